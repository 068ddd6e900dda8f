"""What may stand in vLLM's `kv_connector_extra_config`. Every field is documented here; docs/connect/vllm.md is
generated from it."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class VllmOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the connector, with their defaults."""

    runtime_dir: str = ""
    """Folder of the daemon's sockets; empty: HICACHE_RUNTIME_DIR, else the user's default."""

    tenant: str = "default"
    """Tenant that this engine's KV belongs to."""

    credential: str = ""
    """Tenant's secret, if the daemon asks for one; `env:NAME` reads it from the environment."""

    on_error: Literal["uncached", "refuse"] = "uncached"
    """What to do at start when the daemon, the model or an option does not fit: serve without the cache after one
    clear line, or end vLLM's start with it."""

    revision: str = ""
    """Identity of the weights; empty: a digest of the weight files, or the hub's commit."""

    page_tokens: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0
    """Tokens per page, the unit of sharing; 0: 16 if the engine's block is a multiple of it, else the block."""

    write: bool = True
    """Whether this engine's KV is stored; false: it only reads."""

    min_load_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Shorter hits are recomputed."""

    lookup_timeout_s: Seconds = 0.5
    """A request that has waited so long for the daemon's answer is computed."""

    lookup_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=100)] = 2.0
    """How long the scheduler may wait for an answer when nothing else runs, instead of an empty step."""

    prefetch: Literal["timeout", "wait_complete", "best_effort"] = "timeout"
    """How long a request waits for pages that come from disk to memory: until a timeout, until all are there, or
    not at all."""

    prefetch_base_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 1.0
    """Timeout of a prefetch: this, and prefetch_per_1024_tokens_s for each 1,024 tokens."""

    prefetch_per_1024_tokens_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.25
    """See prefetch_base_s."""

    load_timeout_s: Seconds = 10.0
    """A load that takes longer has failed: its tokens are recomputed."""

    connect_timeout_s: Seconds = 5.0
    """One attempt to register with the daemon."""

    load_failure: Literal["recompute", "fail"] = "recompute"
    """What vLLM does with a request whose load failed; sets kv_load_failure_policy."""


class OptionsError(ValueError):
    """The extra config does not fit; the message names field, expectation and remedy."""


def parse_options(extra: dict[str, Any]) -> VllmOptions:
    """Validate the extra config. Raises `OptionsError`, with the nearest known name for an unknown one."""
    raise NotImplementedError(Path)
