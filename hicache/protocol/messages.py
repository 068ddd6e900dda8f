"""Every message between a client and the daemon: a closed tagged union, validated at decode.

Token ids and block lists travel beside the body as raw little-endian int32 frames; a message states how
many int32 each of its frames must hold, in the order of its `*_count` fields, so that a lying length is seen.

    client                               daemon
      | lifeline: Attach + pool fd, fence fd (unix socket; its EOF is the death of the client)
      | Hello ------------------------------> |
      | <--------------- Welcome | Refuse     |
      | Lookup ---- tokens -----------------> |
      | <--------------------------- Match    |   the match is leased: its pages stay
      | Load ---- blocks -------------------> |
      | <------------------------ Accepted    |   layer by layer: fence words, then Done
      | <---------------------------- Done    |
      | Store ---- tokens, blocks ----------> |
      | <------------------------ Accepted    |
      | <---------------------------- Done    |   source blocks may be reused, pages are visible
"""

from typing import Annotated, Literal

import msgspec

from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec, ShardSpec

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # checked at decode: no reader meets a negative
Instance = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Group = Annotated[bytes, msgspec.Meta(max_length=16)]
Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class _Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    pass


class Scope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a namespace that may differ from request to request.

    `lora` is the adapter's content digest or unique id, never only its display name. `multimodal` are full
    content digests of the images, audio … in the prompt, in order, each with its token position.
    """

    salt: str = ""
    lora: str = ""
    multimodal: tuple[tuple[Count, bytes], ...] = ()


# ---- client to daemon -------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """Open a session. `instance` is the client's random id, `epoch` grows with each of its incarnations.

    Sessions of one tenant that name the same `group` (16 bytes nobody else can guess; empty: none) are processes of
    one engine: what one leases, the others may load, extend, renew and release. A session whose Attach brought no
    memory asks for others: it cannot load or store, and its layout only decides the namespace.

    Without the `token` of its Attached a Hello is refused: who knows the instance alone cannot take the memory."""

    versions: tuple[Count, ...]
    instance: Instance  # the one that Attach carried
    epoch: Count
    model: ModelSpec
    layout: L1Layout
    shard: ShardSpec = ShardSpec()
    tenant: str = "default"
    credential: str = ""
    engine: str = ""  # free text for status pages, e.g. "transformers 5.19"
    group: Group = b""
    token: Annotated[bytes, msgspec.Meta(max_length=16)] = b""  # the one that Attached brought


class Lookup(_Message, frozen=True, tag="lookup"):
    """How far is this prompt known? Frame 0: `tokens` int32.

    With `lease` the resumable pages are kept until Release, Goodbye, death or an unrenewed expiry; without
    it this is a probe and touches neither recency nor leases. `limit_tokens` caps the resumable length. `partial`:
    the engine can use the first tokens of a page and compute the rest of it anew.
    """

    tokens_count: Count
    limit_tokens: Count
    lease: bool = True
    scope: Scope = Scope()
    partial: bool = False


class Extend(_Message, frozen=True, tag="extend"):
    """Look further along a leased sequence. Frame 0: the tokens that follow those of the lease."""

    lease: Count
    tokens_count: Count
    limit_tokens: Count


class Prefetch(_Message, frozen=True, tag="prefetch"):
    """Bring what L3 has of this prompt to L2. Frame 0: tokens. Answered Accepted, then Done."""

    tokens_count: Count
    scope: Scope = Scope()


class Load(_Message, frozen=True, tag="load"):
    """Copy leased pages into L1. One frame per cache group, in the model's order: for each page from
    `first_page` on, the L1 starts (group.block_tokens each) it goes to. Progress shows in `fence`."""

    lease: Count
    first_page: Count
    blocks_count: tuple[Count, ...]
    fence: Count
    generation: Count


class Store(_Message, frozen=True, tag="store"):
    """Offer pages `first_page …` of this sequence. Frame 0: all tokens from position 0 to the end of the
    last page offered; then one frame per group as in Load. The source blocks stay untouched until Done."""

    tokens_count: Count
    first_page: Count
    blocks_count: tuple[Count, ...]
    fence: Count
    generation: Count
    scope: Scope = Scope()


class Renew(_Message, frozen=True, tag="renew"):
    """Keep these leases; with none, a heartbeat. Answered Done with the number of leases still held."""

    leases: tuple[Count, ...] = ()


class Release(_Message, frozen=True, tag="release"):
    """Give leases back. Idempotent: unknown ones are no error. Answered Done."""

    leases: tuple[Count, ...]


class Describe(_Message, frozen=True, tag="describe"):
    """Ask for the daemon's state; needs no session. `what` selects the part."""

    what: Literal["status", "config", "l2", "l3", "sessions"] = "status"


class Goodbye(_Message, frozen=True, tag="goodbye"):
    """Close the session and everything it owns. Answered Done."""


ClientMessage = Hello | Lookup | Extend | Prefetch | Load | Store | Renew | Release | Describe | Goodbye

# ---- daemon to client -------------------------------------------------------------------------------


class ClientLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds that concern a client; all hard."""

    requests_in_flight: Count
    tokens_per_request: Count
    body_bytes: Count
    buffer_bytes: Count
    leases_per_session: Count
    lease_ttl_s: float
    session_silence_s: float


class Welcome(_Message, frozen=True, tag="welcome"):
    version: Count
    session: Count
    limits: ClientLimits
    features: tuple[str, ...] = ()


class Refuse(_Message, frozen=True, tag="refuse"):
    code: str
    reason: str
    remedy: str = ""


class Match(_Message, frozen=True, tag="match"):
    """`known_tokens`: to the token. `resumable_tokens`: to the page, of which `l2_tokens + l3_tokens` is the
    whole. `pending_tokens`: beyond the resumable, being written right now. `lease` is 0 if none was taken.

    `partial_tokens`, if the Lookup asked for them: so many tokens follow the resumable ones in a page that begins
    with them and goes on with others, or beyond the limit. The lease holds it as its last page. `partial_l3`: it is
    not in L2."""

    lease: Count
    known_tokens: Count
    resumable_tokens: Count
    l2_tokens: Count
    l3_tokens: Count
    pending_tokens: Count = 0
    partial_tokens: Count = 0
    partial_l3: bool = False


class Accepted(_Message, frozen=True, tag="accepted"):
    """Work has begun. `pages`: how many it moves (a Store moves only those that are missing)."""

    ticket: Count
    pages: Count


class Done(_Message, frozen=True, tag="done"):
    """The last word on a request. `pages` were moved (Load, Store, Prefetch) or `count` were held (Renew)."""

    ticket: Count = 0
    pages: Count = 0
    count: Count = 0


class Busy(_Message, frozen=True, tag="busy"):
    retry_after_s: float
    reason: str = ""


class Error(_Message, frozen=True, tag="error"):
    """The request had no effect, or its effect was undone."""

    code: str
    message: str
    remedy: str = ""


class Description(_Message, frozen=True, tag="description"):
    """`data` is an embedded MessagePack map of JSON-able values, `schema_version` first."""

    data: msgspec.Raw


DaemonMessage = Welcome | Refuse | Match | Accepted | Done | Busy | Error | Description

# ---- lifeline (unix SOCK_SEQPACKET beside the ZeroMQ socket) ----------------------------------------


class Attach(_Message, frozen=True, tag="attach"):
    """First packet on the lifeline, with two file descriptors by SCM_RIGHTS: the L1 pool and the fence area.

    Both are memfds sealed against shrinking, else a client could make the daemon fault. A client without memory
    says 0 `pool_bytes` and 0 `fence_slots` and sends no descriptor."""

    instance: Instance
    epoch: Count
    pool_bytes: Count
    fence_slots: Count


class Attached(_Message, frozen=True, tag="attached"):
    """The memory is known. `token` is drawn anew for each Attach, and told to nobody else."""

    boot: int  # the boot id, any u64
    token: Token


LifelineMessage = Attach | Attached | Refuse
