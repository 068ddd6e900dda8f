"""What bytes mean in the simulation: every block holds the identity of what was computed for it.

A block's content is (namespace, group, tokens up to the page's end, place in the page), so a block that is served for
other tokens, another tenant, another salt or another group is seen at once, and so is one that was never filled.
"""

from dataclasses import dataclass, field

import numpy as np

from hicache.base.limits import Limits
from hicache.core.sessions import Shape, shape_of
from hicache.keys.namespace import namespace_id
from hicache.protocol.messages import Scope
from hicache.spec.group import GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, ShardSpec

Content = tuple[bytes, str, bytes, int]
GARBAGE: Content = (b"", "garbage", b"", 0)
SECRET = bytes(range(32))
L1_STARTS = 48
WHOLE = ShardSpec()


class SimFailure(AssertionError):
    """The outside saw something that must never happen."""


@dataclass(frozen=True)
class SimModel:
    """A model with its layout, small enough that a pool of some pages fills up all the time."""

    spec: ModelSpec
    layout: L1Layout
    shape: Shape
    shard: ShardSpec = WHOLE


def make_model(
    name: str, page_tokens: int, groups: tuple[tuple[str, int, int], ...], shard: ShardSpec = WHOLE
) -> SimModel:
    """`groups`: (name, block_tokens, layers). One head of 8 one-byte dims: 16 bytes per token and layer."""
    specs, places, first = [], [], 0
    for group, block_tokens, layers in groups:
        specs.append(GroupSpec(group, "full", tuple(range(first, first + layers)), 1, 8, "uint8", block_tokens))
        run = 8 * block_tokens
        places.append(GroupLayout(group, (0,) * layers, L1_STARTS, 8 * block_tokens, (Axis(2, 4096),), run))
        first += layers
    spec = ModelSpec(name, "r1", tuple(specs), page_tokens)
    layout = L1Layout(1 << 20, tuple(places))
    return SimModel(spec, layout, shape_of(spec, layout, shard, SECRET), shard)


_GROUPS = {
    "one": (4, (("kv", 4, 2),)),
    "two": (4, (("a", 2, 2), ("b", 4, 3))),
    "wide": (8, (("kv", 4, 4),)),
}
MODELS = tuple(make_model(name, *rest) for name, rest in _GROUPS.items())
OTHER_SHARDS = {name: make_model(name, *rest, ShardSpec(1, 2)) for name, rest in _GROUPS.items()}
LIMITS = Limits(
    sessions=4,
    requests_in_flight=6,
    leases_per_session=5,
    tokens_per_request=512,
    lease_ttl_s=10.0,
    session_silence_s=5.0,
    tree_tokens=4096,
    io_batch_pages=3,
    pages_in_flight=48,
)


@dataclass
class Truth:
    """What the simulation itself knows: which key stands for which content, and what was ever stored whole."""

    content_of: dict[tuple[bytes, str], list[Content]] = field(default_factory=dict)  # (page key, group)
    stored: set[bytes] = field(default_factory=set)  # page keys

    def namespace(self, model: SimModel, tenant: str, scope: Scope) -> bytes:
        """Computed apart from the sessions' own memory of it."""
        return namespace_id(SECRET, tenant, model.spec, model.layout.fingerprint(), shard=model.shard, scope=scope)

    def learn(self, model: SimModel, namespace: bytes, tokens: bytes) -> list[bytes]:
        """Keys of all pages of `tokens`; remembers what they stand for."""
        keys = model.shape.chain.keys(namespace, tokens)
        size = model.spec.prefix_granularity * 4
        for page, key in enumerate(keys):
            for group in model.shape.groups:
                known = self.content_of.setdefault((key, group.name), [])
                if not known:
                    known.extend(page_content(namespace, group.name, tokens[: (page + 1) * size], group.starts))
        return list(keys)


def page_content(namespace: bytes, group: str, prefix: bytes, starts: int) -> list[Content]:
    return [(namespace, group, prefix, place) for place in range(starts)]


def int32s(values: "list[int] | range") -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(list(values), np.int32)
