"""Where an engine's L1 pool keeps a block: one affine formula.

    address(layer, start, i_1 … i_n) = layer_offsets[layer]
                                     + (start // starts_per_block) · block_stride
                                     + (start % starts_per_block) · start_stride
                                     + Σ i_j · axes[j].stride

Each address starts a contiguous run of `run_bytes`; walking the axes row-major visits a block×layer in the
order in which L2 keeps it. Axes and run describe one start, `block_tokens` tokens of it.

* An engine that pages its pool has block_stride = page bytes and one start per block: start_stride is 0.
* One whose pages are longer than what the cache counts in (128 tokens of one vector each, `block_tokens` 16) has
  starts_per_block = 8, and start_stride = the distance of 16 tokens. Neighbouring starts of a block move as one.
* One that keeps a sequence contiguous (transformers) has block_stride = one token's row and a page is
  `block_tokens` consecutive starts, so a page may begin at any token.

`order` is free text and part of the fingerprint: engines that name the same order and count the same axes share
bytes in L2. In use: "kv,head,token,dim" (transformers: K of all heads, then V), "token,head,content" and
"head,token,content" (vLLM, latent: one vector per token), "head,cpu-KERNEL-TOKENS" (vLLM's CPU backend packs a whole
block of TOKENS tokens as its KERNEL wants it, K and V together; such a block cannot be cut).
"""

import hashlib
from collections.abc import Callable

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
    starts_per_block: int = 1
    start_stride: int = 0  # bytes, 0 with one start per block

    def last_start(self) -> int:
        """Byte distance from a layer's first start to its last: no start lies further."""
        last = self.blocks - 1
        return last // self.starts_per_block * self.block_stride + last % self.starts_per_block * self.start_stride


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
        raise bad(f"axes × run_bytes give {size} bytes, but {spec.arithmetic()} is {spec.block_layer_bytes()}")
    if not 0 < lay.blocks < 1 << 31 or not 0 < lay.block_stride <= pool_bytes:
        raise bad(f"blocks {lay.blocks} and block_stride {lay.block_stride} must be positive and fit")
    _check_starts(lay, bad)
    for offset in lay.layer_offsets:
        end = offset + lay.last_start() + reach
        if offset < 0 or end > pool_bytes:
            last, k = lay.blocks - 1, lay.starts_per_block
            split = f" + {last % k}·{lay.start_stride}" if k > 1 else ""
            raise bad(
                f"block {last} of the layer at {offset} ends at {end} = {offset} + {last // k}·{lay.block_stride}"
                f"{split} + {reach}, past pool_bytes {pool_bytes}"
            )


def _check_starts(lay: GroupLayout, bad: Callable[[str], HiCacheError]) -> None:
    """Raise unless each block is cut into whole starts that lie one after another before the next block's first."""
    k, stride = lay.starts_per_block, lay.start_stride
    if not 0 < k <= 1 << 16 or lay.blocks % k:
        raise bad(f"blocks counts starts and must be a multiple of starts_per_block: {lay.blocks} starts, {k} each")
    if k == 1 and stride != 0:
        raise bad(f"start_stride must be 0 with one start per block, got {stride}")
    if k > 1 and not 0 < stride * (k - 1) < lay.block_stride:
        raise bad(
            f"{k} starts per block, {stride} bytes apart: the last lies {k - 1}·{stride} = {(k - 1) * stride} after "
            f"its block's first, which must be more than 0 and less than block_stride {lay.block_stride}"
        )


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
