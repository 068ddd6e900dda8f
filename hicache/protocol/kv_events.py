"""KV events as vLLM publishes them, so that its routers can follow this cache: encoding alone, no sockets.

A message on the PUB socket has three frames:

    topic │ sequence, 8 bytes big-endian │ MessagePack [time, [event …], data-parallel rank]

An event is a map with its name under `type` and the fields of vLLM's class of that name (vllm/distributed/
kv_events.py). The replay socket takes the sequence to begin with and answers the same frames, each message behind an
empty frame; `END` in place of the sequence, without a payload, is the last.

A page is a block: its hash is the first 8 bytes of its key, as an unsigned integer. Arrays of hashes and tokens are
written by numpy, since they are nearly all of an event.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from hicache.base.ids import DIGEST_BYTES

MEDIUM: dict[Literal["l2", "l3"], str] = {"l2": "CPU", "l3": "DISK"}
SEQUENCE_BYTES = 8
END = b"\xff" * SEQUENCE_BYTES
RANK = 0  # data-parallel: there is one cache

_UINT32 = np.dtype([("tag", "u1"), ("value", ">u4")])
_UINT64 = np.dtype([("tag", "u1"), ("value", ">u8")])
_encode = msgspec.msgpack.Encoder().encode


def block_hash(key: bytes) -> int:
    """What a page is called in events."""
    return int.from_bytes(key[:8], "big")


def stored(medium: str, parent: bytes | None, keys: Sequence[bytes], tokens: bytes, page_tokens: int) -> msgspec.Raw:
    """BlockStored: consecutive pages with their `tokens` (little-endian int32, `page_tokens` for each key) behind the
    page whose key is `parent`; None: these are the first."""
    return _event(
        {
            "type": "BlockStored",
            "block_hashes": _hashes(keys),
            "parent_block_hash": None if parent is None else block_hash(parent),
            # Negative ids do not exist, but a client may send what it likes, and routers expect unsigned.
            "token_ids": _array(np.frombuffer(tokens, "<u4"), _UINT32, 0xCE),
            "block_size": page_tokens,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
        }
    )


def removed(medium: str, keys: Sequence[bytes]) -> msgspec.Raw:
    """BlockRemoved: these pages have left `medium`; another may still have them."""
    return _event({"type": "BlockRemoved", "block_hashes": _hashes(keys), "medium": medium})


def cleared() -> msgspec.Raw:
    """AllBlocksCleared: whatever a router knew of this cache is void."""
    return _event({"type": "AllBlocksCleared"})


def batch(time_s: float, events: Sequence[msgspec.Raw]) -> bytes:
    """The third frame. `time_s`: seconds since 1970."""
    return _encode([time_s, list(events), RANK])


def sequence_frame(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def replay_start(frames: Sequence[bytes]) -> int | None:
    """The sequence that a replay request asks for; None if it is none. `frames` follow the peer's identity."""
    if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE_BYTES:
        return None
    return int.from_bytes(frames[1], "big")


def _event(fields: dict[str, object]) -> msgspec.Raw:
    return msgspec.Raw(_encode(fields))


def _hashes(keys: Sequence[bytes]) -> msgspec.Raw:
    words = np.frombuffer(b"".join(keys), ">u8").reshape(len(keys), DIGEST_BYTES // 8)
    return _array(words[:, 0], _UINT64, 0xCF)


def _array(values: npt.NDArray[np.unsignedinteger], item: np.dtype[np.void], tag: int) -> msgspec.Raw:
    """A MessagePack array of unsigned integers, all in the width of `item`."""
    count = values.size
    out = np.empty(count, item)
    out["tag"] = tag
    out["value"] = values
    if count < 16:
        head = bytes([0x90 | count])
    elif count < 1 << 16:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return msgspec.Raw(head + out.tobytes())
