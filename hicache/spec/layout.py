"""Where an engine's L1 pool keeps a block: one affine formula.

    address(layer, block, i_1 … i_k) = layer_offsets[layer] + block · block_stride + Σ i_j · axes[j].stride

Each address starts a contiguous run of `run_bytes`; walking the axes row-major visits a block×layer in the
order in which L2 keeps it. `block` counts *starts*: an engine that pages its pool has block_stride = page
bytes; one that keeps a sequence contiguous (transformers) has block_stride = one token's row and a page is
`block_tokens` consecutive starts, so a page may begin at any token.
"""

import hashlib

import msgspec

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import DIGEST_BYTES, Fingerprint
from hicache.spec.group import GroupSpec
from hicache.spec.model import ModelSpec


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One loop inside a block×layer: `count` steps of `stride` bytes."""

    count: int
    stride: int


class GroupLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Placement of one cache group. `order` names the element order of a block×layer, outer to inner."""

    group: str
    layer_offsets: tuple[int, ...]  # bytes from the pool's start, one per layer of the group
    blocks: int  # valid starts are 0 … blocks-1
    block_stride: int  # bytes
    axes: tuple[Axis, ...]  # outer to inner
    run_bytes: int
    order: str = "kv,head,token,dim"


class L1Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine rank's pool: its size and where each group lies."""

    pool_bytes: int
    groups: tuple[GroupLayout, ...]

    def fingerprint(self) -> Fingerprint:
        """BLAKE2b-256 over what decides the byte order in L2; strides and sizes of the pool do not."""
        parts = [(g.group, g.order, tuple(a.count for a in g.axes), g.run_bytes) for g in self.groups]
        data = msgspec.json.encode(parts, order="deterministic")
        return Fingerprint(hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"hicache-layout").digest())


def _check_group(spec: GroupSpec, lay: GroupLayout, pool_bytes: int) -> None:
    def bad(text: str) -> HiCacheError:
        return HiCacheError(ErrorCode.BAD_SPEC, f"layout of group {spec.name!r}: {text}")

    if len(lay.layer_offsets) != len(spec.layers):
        raise bad(f"{len(lay.layer_offsets)} layer_offsets for {len(spec.layers)} layers")
    if len(lay.axes) > 4:
        raise bad(f"at most 4 axes, got {len(lay.axes)}")
    size, reach = lay.run_bytes, lay.run_bytes
    for axis in lay.axes:
        if not 0 < axis.count <= 1 << 20 or not 0 <= axis.stride <= pool_bytes:
            raise bad(f"axis {axis.count}×{axis.stride} is out of range")
        size *= axis.count
        reach += (axis.count - 1) * axis.stride
    if lay.run_bytes <= 0 or size != spec.block_layer_bytes():
        raise bad(
            f"axes × run_bytes give {size} bytes, but 2·{spec.block_tokens}·{spec.kv_heads}·{spec.head_dim}·"
            f"{spec.dtype} is {spec.block_layer_bytes()}"
        )
    if not 0 < lay.blocks < 1 << 31 or not 0 < lay.block_stride <= pool_bytes:
        raise bad(f"blocks {lay.blocks} and block_stride {lay.block_stride} must be positive and fit")
    for offset in lay.layer_offsets:
        end = offset + (lay.blocks - 1) * lay.block_stride + reach
        if offset < 0 or end > pool_bytes:
            raise bad(f"block {lay.blocks - 1} of the layer at {offset} ends at {end}, past pool_bytes {pool_bytes}")


def check_layout(model: ModelSpec, layout: L1Layout, max_pool_bytes: int = 1 << 46) -> None:
    """Raise `HiCacheError(BAD_SPEC)` unless every address that the layout can form lies in the pool."""
    if not 0 < layout.pool_bytes <= max_pool_bytes:
        raise HiCacheError(
            ErrorCode.BAD_SPEC, f"layout: pool_bytes must be 1 to {max_pool_bytes}, got {layout.pool_bytes}"
        )
    names = [g.group for g in layout.groups]
    if names != [g.name for g in model.groups]:
        raise HiCacheError(
            ErrorCode.BAD_SPEC,
            f"layout: groups {names} differ from the model's {[g.name for g in model.groups]}",
        )
    for spec, lay in zip(model.groups, layout.groups, strict=True):
        _check_group(spec, lay, layout.pool_bytes)
