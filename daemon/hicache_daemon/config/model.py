"""The settings as immutable models: sizes in bytes, durations in seconds.

A field's description is its documentation; `hot` marks what a reload may change while the daemon runs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hicache.base.limits import Limits
from hicache_client.paths import runtime_dir
from hicache_daemon.config.kinds import ConfigPath, Duration, Size, SizeOrAuto, duration_between, size_between

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
HOT: dict[str, Any] = {"hot": True}

_base = Limits()


def default_runtime_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where a client looks by itself. Raises `HiCacheError(DENIED)` if another user took that folder."""
    return runtime_dir(None, env).absolute()


class Section(BaseModel):
    """Unknown keys are errors, nothing is coerced, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ServerSettings(Section):
    """The daemon process."""

    runtime_dir: ConfigPath = Field(default_factory=default_runtime_dir)
    """Folder of the control and lifeline sockets; made with mode 0750, refused if another user owns it.
    Default: `$HICACHE_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/hicache`, else `/tmp/hicache-<uid>`."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", json_schema_extra=HOT)
    """Least severity that is logged."""

    log_format: Literal["console", "json"] = "console"
    """`console` for people, `json` for collectors: one object per line on stderr."""

    drain: Annotated[Duration, duration_between(0.0, 3600.0)] = Field(default=_base.drain_s, json_schema_extra=HOT)
    """How long a stopping daemon waits for transfers in flight before it drops them."""


class L2Settings(Section):
    """The host arena: one shared memory, allocated and touched at start."""

    size: Annotated[Size, size_between(MIB, 64 * TIB)] = GIB
    """Bytes of host memory, taken at start and kept."""

    hugepages: Literal["off", "2MiB", "1GiB"] = "off"
    """Back the arena by huge pages, which must be reserved beforehand (`vm.nr_hugepages`)."""

    parent: Annotated[SizeOrAuto, size_between(4 * KIB, 4 * GIB)] = "auto"
    """Bytes of one allocation unit of the arena. `auto` takes about 2 MiB or one block of the first model; set
    it to the largest block when models of several sizes share the daemon. A multiple of 4KiB."""

    copy_threads: int = Field(default=2, ge=1, le=256)
    """Threads that move pages between engines and the arena."""


class L3Settings(Section):
    """The disk tier."""

    enabled: bool = False
    """Keep pages on local disk, so that they outlive the daemon and the arena's size."""

    path: ConfigPath | None = None
    """Folder of the tier, owned by one daemon. A local file system: not NFS, not overlayfs."""

    size: Annotated[Size, size_between(16 * MIB, 1024 * TIB)] = 16 * GIB
    """Cap on the bytes allocated on disk; the least recently used pages leave first."""

    write_policy: Literal["write_through", "write_back", "none"] = "write_through"
    """When a page is copied down: as soon as it is complete, when it leaves the arena, or never."""

    threads: int = Field(default=2, ge=1, le=64)
    """Reader threads; writes have one thread of their own."""

    min_free: Annotated[Size, size_between(0, 1024 * TIB)] = Field(default=GIB, json_schema_extra=HOT)
    """Free space on the file system below which the tier stops writing; reads go on."""

    allow_unsafe_fs: bool = False
    """Also open the tier on NFS or overlayfs, where a crash may lose it or worse; for trials in containers."""


class LimitsSettings(Section):
    """Hard bounds. At a bound a client gets a typed error or `busy`, never a growing queue."""

    sessions: int = Field(default=_base.sessions, ge=1, le=65536)
    """Engine processes connected at once."""

    requests_in_flight: int = Field(default=_base.requests_in_flight, ge=1, le=65536)
    """Requests that one session may have open."""

    leases_per_session: int = Field(default=_base.leases_per_session, ge=1, le=1 << 20)
    """Matches that one session may hold."""

    tokens_per_request: int = Field(default=_base.tokens_per_request, ge=1, le=1 << 26)
    """Tokens of one lookup or store."""

    pages_in_flight: int = Field(default=_base.pages_in_flight, ge=1, le=1 << 24)
    """Pages owned by open transfers, all sessions together."""

    tree_tokens: int = Field(default=_base.tree_tokens, ge=1, le=1 << 36)
    """Token ids held by the index, four bytes each."""

    io_batch_pages: int = Field(default=_base.io_batch_pages, ge=1, le=4096)
    """Pages of one disk batch."""

    body_size: Annotated[Size, size_between(64 * KIB, 64 * MIB)] = _base.body_bytes
    """Largest message body."""

    buffer_size: Annotated[Size, size_between(64 * KIB, GIB)] = _base.buffer_bytes
    """Largest raw buffer beside a body (token ids, block lists)."""

    pool_size: Annotated[Size, size_between(MIB, 1 << 50)] = _base.pool_bytes
    """Largest memory that one engine may register."""

    lease_ttl: Annotated[Duration, duration_between(1.0, 86400.0)] = _base.lease_ttl_s
    """A match that is not renewed for this long is given up. Clients renew by themselves."""

    session_silence: Annotated[Duration, duration_between(1.0, 86400.0)] = _base.session_silence_s
    """A session without any message for this long is suspect. The death of a process is seen at once."""


class IdentitySettings(Section):
    """What makes page keys unforgeable."""

    secret_file: ConfigPath | None = None
    """File of exactly 32 random bytes, or of 64 hex digits, mode 0600, that key the hash of every page; made with
    `(umask 077; head -c 32 /dev/urandom > FILE)`. Daemons that are to share pages need the same. Without it the
    daemon makes its own, kept beside the disk tier if there is one."""


class KvEventsSettings(Section):
    """KV events: routers learn which pages the cache holds. Off by default, since token ids leave the daemon."""

    enabled: bool = False
    """Publish what pages come and go, with their token ids, as vLLM does."""

    endpoint: str | None = None
    """Where routers subscribe: `ipc:///absolute/path` or `tcp://127.0.0.1:5557`. Default: `events.sock` in
    `server.runtime_dir`, which only this user may open."""

    replay_endpoint: str | None = None
    """Where routers ask for what they missed, and for everything when they come late. Default: `replay.sock` in
    `server.runtime_dir`."""

    allow_remote: bool = False
    """Accept a `tcp://` endpoint beyond loopback. It has neither encryption nor a password: whoever reaches the port
    reads the prompts of the announced tenants."""

    topic: str = ""
    """First frame of every message. llm-d expects `kv@<pod address>@<model>`."""

    tenants: list[str] = Field(default=["default"], json_schema_extra={"x-kind": "list of names"})
    """Tenants whose pages are announced. Those of requests with a salt, a LoRA or multimodal content never are."""

    model: str | None = None
    """Announce this model's pages alone, by the name that engines give. Events do not name their model, so set it
    when models share the daemon."""

    replay_buffer: Annotated[Size, size_between(4 * KIB, 64 * GIB)] = 64 * MIB
    """Memory for the latest batches. Who missed more is sent everything that is known."""


class TenantSettings(Section):
    """One tenant."""

    credential_file: ConfigPath | None = None
    """File with the credential that a client of this tenant must present. None: any client may use the name."""


class Settings(Section):
    """Everything that `hicached` can be told."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    l2: L2Settings = Field(default_factory=L2Settings)
    l3: L3Settings = Field(default_factory=L3Settings)
    limits: LimitsSettings = Field(default_factory=LimitsSettings)
    identity: IdentitySettings = Field(default_factory=IdentitySettings)
    kv_events: KvEventsSettings = Field(default_factory=KvEventsSettings)
    tenants: dict[str, TenantSettings] = Field(default_factory=dict)
    """Tenants by name. Empty: any name is accepted, without a credential. Otherwise only those listed."""

    def to_limits(self) -> Limits:
        """The bounds as the rest of the house takes them."""
        lim = self.limits
        return Limits(
            sessions=lim.sessions,
            requests_in_flight=lim.requests_in_flight,
            leases_per_session=lim.leases_per_session,
            tokens_per_request=lim.tokens_per_request,
            pages_in_flight=lim.pages_in_flight,
            tree_tokens=lim.tree_tokens,
            io_batch_pages=lim.io_batch_pages,
            body_bytes=lim.body_size,
            buffer_bytes=lim.buffer_size,
            pool_bytes=lim.pool_size,
            lease_ttl_s=lim.lease_ttl,
            session_silence_s=lim.session_silence,
            drain_s=self.server.drain,
        )
