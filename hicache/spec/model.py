"""A model as the cache sees it, and its 256-bit fingerprint."""

import hashlib

import msgspec

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import DIGEST_BYTES, Fingerprint
from hicache.spec.group import GroupSpec


class RopeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How positions enter the keys. `scaling` is the engine's canonical description (sorted JSON, or "")."""

    kind: str = "none"  # none | default | linear | dynamic | yarn | llama3 | longrope
    base: float = 0.0
    rotary_dim: int = 0
    pairing: str = "half"  # half | interleaved
    attention_scaling: float = 1.0
    scaling: str = ""


class ShardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of the model one engine rank holds."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def check(self) -> None:
        """Raise `HiCacheError(BAD_SPEC)` unless every rank is below its size."""
        for axis in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size <= 65536:
                raise HiCacheError(
                    ErrorCode.BAD_SPEC, f"shard: {axis}_rank {rank} must be in [0, {axis}_size={size})"
                )


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a model that decides whether two KV blocks mean the same.

    `revision` identifies the weights (a digest of them, or a hub commit). `prefix_granularity` is P: tokens
    behind one page key; every group's `block_tokens` divides P or is a multiple of it.
    """

    name: str
    revision: str
    groups: tuple[GroupSpec, ...]
    prefix_granularity: int
    rope: RopeSpec = RopeSpec()

    def fingerprint(self) -> Fingerprint:
        """BLAKE2b-256 of the canonical JSON of all fields (struct order is fixed, maps sorted)."""
        data = msgspec.json.encode(self, order="deterministic")
        return Fingerprint(hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"hicache-model").digest())

    def check(self, max_groups: int = 16, max_layers: int = 1024) -> None:
        """Raise `HiCacheError(BAD_SPEC | UNSUPPORTED)` naming the field unless the model adds up."""

        def bad(text: str) -> HiCacheError:
            return HiCacheError(ErrorCode.BAD_SPEC, text)

        if not 0 < len(self.name) <= 512 or not 0 < len(self.revision) <= 512:
            raise bad("model: name and revision must have 1 to 512 characters")
        if not 0 < self.prefix_granularity <= 65536:
            raise bad(f"model: prefix_granularity must be 1 to 65536, got {self.prefix_granularity}")
        if not 0 < len(self.groups) <= max_groups:
            raise bad(f"model: groups must have 1 to {max_groups} entries, got {len(self.groups)}")
        seen: set[int] = set()
        for group in self.groups:
            group.check()
            twice = seen.intersection(group.layers)
            if twice:
                raise bad(f"model: layers {sorted(twice)} stand in more than one group")
            seen.update(group.layers)
            p, b = self.prefix_granularity, group.block_tokens
            if p % b and b % p:
                raise bad(
                    f"group {group.name!r}: block_tokens {b} neither divides prefix_granularity {p} "
                    "nor is a multiple of it"
                )
        if len(seen) > max_layers:
            raise bad(f"model: {len(seen)} layers, at most {max_layers}")
        if len({group.name for group in self.groups}) != len(self.groups):
            raise bad("model: group names must differ")
