"""What callers hand in, checked; what the daemon answers, as errors."""

from collections.abc import Sequence
from operator import index

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.protocol.messages import Busy, Error, Refuse
from hicache.protocol.wire import Buffer


def int32s(buffer: Buffer, name: str) -> memoryview:
    """The bytes of a contiguous buffer of int32 (or of raw bytes). Raises `ValueError` for anything else: an
    int64 array would otherwise pass as twice as many numbers."""
    view = memoryview(buffer)
    if view.itemsize != 1 and (view.itemsize != 4 or view.format.lstrip("<=@") not in ("i", "l")):
        raise ValueError(f"{name} must hold int32, got items of format {view.format!r}")
    if not view.c_contiguous:
        raise ValueError(f"{name} must be contiguous")
    if view.nbytes % 4:
        raise ValueError(f"{name} must hold whole int32, got {view.nbytes} bytes")
    return view.cast("B") if view.nbytes else memoryview(b"")


def int32s_per_group(blocks: Sequence[Buffer], groups: int) -> tuple[memoryview, ...]:
    """One checked buffer per cache group. Raises `ValueError`."""
    if len(blocks) != groups:
        raise ValueError(f"blocks must name {groups} cache groups in the model's order, got {len(blocks)}")
    return tuple(int32s(each, f"blocks[{number}]") for number, each in enumerate(blocks))


def error_of(reply: Error | Busy | Refuse) -> HiCacheError:
    """The daemon's no as an exception; a code of a newer daemon reads as INTERNAL."""
    match reply:
        case Busy():
            return HiCacheError(ErrorCode.BUSY, reply.reason or "the daemon is busy")
        case Refuse():
            text = reply.reason
        case Error():
            text = reply.message
    try:
        code = ErrorCode(reply.code)
    except ValueError:
        code = ErrorCode.INTERNAL
    return HiCacheError(code, text, reply.remedy)


def natural(value: int, name: str) -> int:
    """`value` as a plain int (numpy's are taken too). Raises `ValueError` if it is negative."""
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return index(value)
