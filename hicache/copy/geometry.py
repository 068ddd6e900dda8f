"""From a model and an engine's layout to what a mover needs: `GroupGeometry`, and its canonical axes."""

import numpy as np
import numpy.typing as npt

from hicache.copy.base import GroupGeometry
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec

Axes = tuple[tuple[int, int], ...]


def geometry_of(model: ModelSpec, layout: L1Layout) -> tuple[GroupGeometry, ...]:
    """One geometry per cache group, in the model's order. The two were checked against each other before
    (`spec.layout.check_layout`)."""
    return tuple(
        GroupGeometry(
            layers=spec.layers,
            block_layer_bytes=spec.block_layer_bytes(),
            layer_offsets=place.layer_offsets,
            blocks=place.blocks,
            block_stride=place.block_stride,
            axes=tuple((axis.count, axis.stride) for axis in place.axes),
            run_bytes=place.run_bytes,
            block_tokens=spec.block_tokens,
            starts_per_block=place.starts_per_block,
            start_stride=place.start_stride,
        )
        for spec, place in zip(model.groups, layout.groups, strict=True)
    )


def canonical(axes: Axes, run_bytes: int) -> tuple[Axes, int]:
    """The same addresses in the same order with the fewest axes and the longest run.

    An axis of one step goes; an innermost axis whose stride equals the run lengthens the run; two axes that
    walk on without a gap become one.
    """
    kept: list[tuple[int, int]] = []
    for count, stride in reversed(axes):  # inner to outer
        if count == 1:
            continue
        if not kept and stride == run_bytes:
            run_bytes *= count
        elif kept and stride == kept[-1][0] * kept[-1][1]:
            kept[-1] = (kept[-1][0] * count, kept[-1][1])
        else:
            kept.append((count, stride))
    return tuple(reversed(kept)), run_bytes


def start_places(geometry: GroupGeometry, starts: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Byte distance of each start from its layer's first."""
    wide = starts.astype(np.int64)
    if geometry.starts_per_block == 1:
        return wide * geometry.block_stride
    cut = geometry.starts_per_block
    return wide // cut * geometry.block_stride + wide % cut * geometry.start_stride


def neighbour_step(geometry: GroupGeometry) -> int:
    """How far apart, in bytes, two pages lie that follow each other in L1.

    A paged pool has disjoint starts: one start further, within a block if blocks hold several. Where a start is one
    row and a page covers `block_tokens` of them, the next page begins `block_tokens` starts later. Axes that step
    over the whole region (K to V, head to head) say nothing about this and are left out.
    """
    if geometry.starts_per_block > 1:
        return geometry.start_stride
    region = geometry.blocks * geometry.block_stride
    reach = geometry.run_bytes + sum((n - 1) * stride for n, stride in geometry.axes if stride < region)
    return geometry.block_stride * (1 if reach <= geometry.block_stride else geometry.block_tokens)
