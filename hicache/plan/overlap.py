"""A load moves in waves of neighbouring layers, so that the engine computes early layers while later ones move.

One layer at a time tells the engine soonest but costs one call per block and layer; all layers at once costs
the fewest calls and overlaps nothing. Waves begin narrow and double: the first layer is there early, the rest
moves at full speed, and when copying is the slower side the engine has only the last wave's layers left to
compute after the last byte. Small blocks pay more for calls than they gain by an early first layer, so their
waves are wider.
"""

SMALL_BYTES = 16 << 10  # of one block of one layer; below, a call costs as much as the bytes it moves
WIDTHS = (1, 8)  # layers of the first and of the widest wave; wider gained nothing (docs/internals/copy.md)
SMALL_WIDTHS = (4, 16)


def layer_waves(layers: int, block_layer_bytes: int) -> list[tuple[int, int]]:
    """Cut layers 0 … layers-1 into consecutive waves `(low, high)`, high exclusive.

    `block_layer_bytes`: of one block of one layer, the smallest of the groups that move.
    """
    width, widest = SMALL_WIDTHS if block_layer_bytes < SMALL_BYTES else WIDTHS
    waves: list[tuple[int, int]] = []
    low = 0
    while low < layers:
        high = min(low + width, layers)
        waves.append((low, high))
        low, width = high, min(2 * width, widest)
    return waves
