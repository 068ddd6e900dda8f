"""A load moves in waves of neighbouring layers, so that the engine computes early layers while later ones move.

One layer at a time tells the engine soonest but costs one call per block and layer; all layers at once costs
the fewest calls and overlaps nothing. Waves begin with one layer and double: the first layer is there at once,
the rest moves at full speed, and when copying is the slower side the engine has only the last wave's layers
left to compute after the last byte.
"""

WAVE_LAYERS = 8  # measured: beyond 8 layers per call little is gained (docs/internals/copy.md)


def layer_waves(layers: int, max_layers: int = WAVE_LAYERS) -> list[tuple[int, int]]:
    """Cut layers 0 … layers-1 into consecutive waves `(low, high)`, high exclusive, of at most `max_layers`."""
    waves: list[tuple[int, int]] = []
    low, width = 0, 1
    while low < layers:
        high = min(low + width, layers)
        waves.append((low, high))
        low, width = high, min(2 * width, max_layers)
    return waves
