"""A load moves in waves of neighbouring layers, so that the engine computes early layers while later ones move.

One layer at a time tells the engine soonest but costs one call per block and layer; all layers at once costs
the fewest calls and overlaps nothing. Waves begin with one layer and double while they stay small, so the first
layer is there at once and the rest moves at full speed.
"""

from collections.abc import Sequence

WAVE_LAYERS = 8  # measured: beyond 8 layers per call nothing is gained
WAVE_BYTES = 16 << 20  # about 2 ms of copying; below what a layer's computation over as many tokens takes


def layer_waves(
    layer_bytes: Sequence[int], max_bytes: int = WAVE_BYTES, max_layers: int = WAVE_LAYERS
) -> list[tuple[int, int]]:
    """Cut layers 0 … len-1 into consecutive waves `(low, high)`, high exclusive; every layer is in exactly one.

    `layer_bytes[i]` is what layer i of the model moves. A wave holds at most `max_layers` layers and
    `max_bytes` bytes, or a single layer.
    """
    waves: list[tuple[int, int]] = []
    low, width, count = 0, 1, len(layer_bytes)
    while low < count:
        high, size = low + 1, layer_bytes[low]
        while high < count and high - low < width and size + layer_bytes[high] <= max_bytes:
            size += layer_bytes[high]
            high += 1
        waves.append((low, high))
        low, width = high, min(2 * width, max_layers)
    return waves
