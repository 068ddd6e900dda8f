"""What may stand in vLLM's `kv_connector_extra_config`. Every field is documented here; the connector's page is
generated from it."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import inspect

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]

SHOWN_CHARS = 40  # of a wrong value, in the message about it


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

    min_load_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 16
    """Shorter hits are recomputed."""

    lookup_timeout_s: Seconds = 0.5
    """A request that has waited so long for the daemon's answer is computed."""

    lookup_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=100)] = 2.0
    """How long the scheduler may wait for an answer when nothing else runs, instead of an empty step."""

    prefetch: Literal["timeout", "wait_complete", "best_effort"] = "timeout"
    """How long a request waits for pages that come from disk to memory: until a timeout, and what is not there then
    is recomputed; until all are there, at most a minute; or not at all, so that the load itself reads the disk."""

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

    @property
    def directory(self) -> Path | None:
        """`runtime_dir` as the client takes it."""
        return Path(self.runtime_dir).expanduser() if self.runtime_dir else None

    def __repr__(self) -> str:
        """Without the credential: this stands in logs."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["credential"] = "***" if self.credential else ""
        return f"VllmOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class OptionsError(ValueError):
    """The extra config does not fit; the message names field, expectation and remedy."""


def parse_options(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> VllmOptions:
    """Validate the extra config. Raises `OptionsError` with all that is wrong in one line: for an unknown name the
    nearest known one, for a value its field, what was expected, what came and what to do.

    `environ` (default: the process's) is where `env:NAME` is looked up."""
    known = {field.name: field for field in inspect.type_info(VllmOptions).fields}  # type: ignore[attr-defined]
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, value in extra.items():
        if name not in known:
            problems.append(_unknown(str(name), list(known)))
            continue
        try:
            values[name] = msgspec.convert(value, VllmOptions.__annotations__[name])
        except msgspec.ValidationError:
            problems.append(_wrong(name, value, known[name]))
    if "credential" in values:
        try:
            values["credential"] = _secret(values["credential"], os.environ if environ is None else environ)
        except OptionsError as error:
            problems.append(str(error))
    if problems:
        raise OptionsError(f"kv_connector_extra_config: {'; '.join(problems)}")
    return VllmOptions(**values)


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    shown = name if len(name) <= SHOWN_CHARS else f"{name[:SHOWN_CHARS]}…"
    remedy = f"did you mean {near[0]!r}?" if near else f"remove it; known are {', '.join(sorted(known))}"
    return f"{shown!r} is no option: {remedy}"


def _wrong(name: str, value: Any, field: inspect.Field) -> str:
    if name == "credential":
        got = f"a {type(value).__name__}"  # never the value
    else:
        text = repr(value)
        got = f"{text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + '…'} ({type(value).__name__})"
    return f"{name}: expected {_expected(field.type)}, got {got}: leave it out for the default {field.default!r}"


def _expected(type_info: inspect.Type) -> str:
    match type_info:
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(repr(value) for value in values)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            kind = "a whole number" if isinstance(type_info, inspect.IntType) else "a number"
            bounds = [
                f"{word} {bound:g}"
                for word, bound in (
                    ("above", type_info.gt),
                    ("at least", type_info.ge),
                    ("below", type_info.lt),
                    ("at most", type_info.le),
                )
                if bound is not None
            ]
            return f"{kind} {' and '.join(bounds)}".rstrip()
        case _:
            return "a text"


def _secret(value: str, environ: Mapping[str, str]) -> str:
    scheme, colon, name = value.partition(":")
    if not colon or scheme != "env":
        return value
    secret = environ.get(name, "")
    if not secret:
        raise OptionsError(
            f"credential: expected the environment variable {name!r} to hold the tenant's secret, got "
            f"{'an empty one' if name in environ else 'none of that name'}: export it to every vLLM process"
        )
    return secret
