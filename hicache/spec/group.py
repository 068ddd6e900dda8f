"""One cache group: layers that share attention kind and geometry."""

from typing import Literal

import msgspec

from hicache.base.errors import ErrorCode, HiCacheError

GroupKind = Literal["full", "sliding", "latent", "state"]

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of one cache group.

    `layers` are the model's layer indices in this group, ascending. `kv_heads` are those of this shard; a `latent`
    group (MLA) keeps one vector per token instead of K and V of each head: 1 head of `head_dim` = its length.
    `block_tokens` is the block granularity: tokens that one block covers. `window` is W for `sliding`
    (a query at t sees keys t-W+1 … t), else 0.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    window: int = 0

    def block_layer_bytes(self) -> int:
        """Bytes of one block of one layer: 2 · tokens · heads · head_dim · element (K and V); latent: not twice."""
        vectors = 1 if self.kind == "latent" else 2
        return vectors * self.block_tokens * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def arithmetic(self) -> str:
        """How `block_layer_bytes` comes about, for messages."""
        vectors = "" if self.kind == "latent" else "2·"
        return f"{vectors}{self.block_tokens}·{self.kv_heads}·{self.head_dim}·{self.dtype}"

    def block_bytes(self) -> int:
        """Bytes of one block, all layers of the group."""
        return len(self.layers) * self.block_layer_bytes()

    def check(self) -> None:
        """Raise `HiCacheError(BAD_SPEC | UNSUPPORTED)` naming the field unless the group adds up."""

        def need(ok: bool, field: str, expected: str, got: object) -> None:
            if not ok:
                raise HiCacheError(
                    ErrorCode.BAD_SPEC, f"group {self.name!r}: {field} must be {expected}, got {got!r}"
                )

        need(0 < len(self.name) <= 64, "name", "1 to 64 characters", self.name)
        need(len(self.layers) > 0, "layers", "a non-empty list", self.layers)
        ascending = all(a < b for a, b in zip(self.layers, self.layers[1:], strict=False))
        need(ascending and self.layers[0] >= 0, "layers", "ascending, from 0, each once", self.layers)
        need(0 < self.kv_heads <= 4096, "kv_heads", "1 to 4096", self.kv_heads)
        need(0 < self.head_dim <= 65536, "head_dim", "1 to 65536", self.head_dim)
        need(self.dtype in DTYPE_BYTES, "dtype", f"one of {sorted(DTYPE_BYTES)}", self.dtype)
        need(0 < self.block_tokens <= 65536, "block_tokens", "1 to 65536", self.block_tokens)
        need((self.window > 0) == (self.kind == "sliding"), "window", "> 0 for sliding, else 0", self.window)
        if self.kind not in ("full", "latent"):
            raise HiCacheError(
                ErrorCode.UNSUPPORTED,
                f"group {self.name!r}: kind {self.kind!r} is not carried yet, only 'full' and 'latent'",
                "run this model without hicache, or use a model whose layers all use full attention or MLA",
            )
        need(self.kind == "full" or self.kv_heads == 1, "kv_heads", "1 for latent", self.kv_heads)
