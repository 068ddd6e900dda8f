"""vLLM's classes as far as the connector touches them, for an environment without vLLM.

Importing this module imports the connector's modules with stand-ins for vLLM's base classes, and takes the stand-ins
away again: `import vllm` still says what is installed. Where vLLM is installed the real ones are used.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
OURS = ("metadata", "stats", "tracked", "flights", "lookups", "scheduler")


@dataclass
class _Stats:
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return self.data


class _PromMetrics:
    def __init__(self, vllm_config: Any, metric_types: dict[Any, Any], labelnames: Any, per_engine: Any) -> None:
        kinds = {kind.__name__: made for kind, made in metric_types.items()}
        self._gauge_cls, self._counter_cls = kinds["Gauge"], kinds["Counter"]
        self._histogram_cls = kinds["Histogram"]
        self._labelnames, self.per_engine_labelvalues = labelnames, per_engine


@contextmanager
def stand_ins() -> Iterator[None]:
    """`vllm` in sys.modules for a while, unless it is installed or was put there by somebody else."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        yield
        return
    made: dict[str, types.ModuleType] = {}
    for path in (BASE, METRICS):
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
    for name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorHandshakeMetadata"):
        setattr(made[BASE], name, type(name, (), {}))
    made[METRICS].KVConnectorStats = _Stats  # type: ignore[attr-defined]
    made[METRICS].KVConnectorPromMetrics = _PromMetrics  # type: ignore[attr-defined]
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            sys.modules.pop(name, None)


with stand_ins():
    for _name in OURS:
        importlib.import_module(f"hicache_client.connectors.vllm.{_name}")


@dataclass
class FakePosition:
    offset: int
    length: int = 1


@dataclass
class FakeFeature:
    """A MultiModalFeatureSpec."""

    identifier: str
    mm_position: FakePosition
    modality: str = "image"


@dataclass
class FakeLora:
    """A LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


@dataclass(eq=False)
class FakeRequest:
    """A v1 Request. `script` are its prompt and the output it will have; `known` of them the scheduler knows."""

    request_id: str
    script: list[int]
    num_prompt_tokens: int
    known: int = -1
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    cache_salt: str | None = None
    lora_request: FakeLora | None = None
    mm_features: Sequence[FakeFeature] = ()
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    resumable: bool = False
    abort_immediately: bool = False

    def __post_init__(self) -> None:
        self.known = self.num_prompt_tokens if self.known < 0 else self.known

    @property
    def num_tokens(self) -> int:
        return self.known

    @property
    def all_token_ids(self) -> list[int]:
        return self.script[: self.known]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.script[: self.num_prompt_tokens]


@dataclass
class FakeBlocks:
    """A KVCacheBlocks."""

    table: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(ids) for ids in self.table)


@dataclass
class FakeNew:
    """A NewRequestData."""

    req_id: str
    block_ids: tuple[list[int], ...]


@dataclass
class FakeCached:
    """A CachedRequestData."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class FakeStep:
    """A SchedulerOutput."""

    scheduled_new_reqs: list[FakeNew] = field(default_factory=list)
    scheduled_cached_reqs: FakeCached = field(default_factory=FakeCached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)


@dataclass
class FakeReport:
    """A KVConnectorOutput."""

    kv_connector_worker_meta: Any = None
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
