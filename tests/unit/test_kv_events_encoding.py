"""KV events are read back with vLLM's own classes, declared here again, and with a plain MessagePack library."""

import os
import struct
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from hicache.protocol import kv_events


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "big") + os.urandom(24)


def decode(*events: msgspec.Raw) -> KVEventBatch:
    return msgspec.msgpack.decode(kv_events.batch(12.5, events), type=KVEventBatch)


def test_all_three_events_are_vllms() -> None:
    tokens = np.arange(8, dtype="<i4").tobytes()
    got = decode(
        kv_events.cleared(),
        kv_events.stored("CPU", key_of(9), [key_of(1), key_of(2)], tokens, 4),
        kv_events.stored("DISK", None, [key_of(1)], tokens[:16], 4),
        kv_events.removed("CPU", [key_of(2), key_of(3)]),
    )
    assert (got.ts, got.data_parallel_rank) == (12.5, 0)
    assert got.events == [
        AllBlocksCleared(),
        BlockStored([1, 2], 9, list(range(8)), 4, None, "CPU", None),
        BlockStored([1], None, [0, 1, 2, 3], 4, None, "DISK", None),
        BlockRemoved([2, 3], "CPU"),
    ]


def test_a_plain_library_sees_maps_with_the_fields_in_vllms_order() -> None:
    raw = kv_events.batch(1.0, [kv_events.stored("CPU", None, [key_of(5)], bytes(16), 4)])
    _, (event,), _ = msgpack.unpackb(raw)
    fields = [name for name in BlockStored.__struct_fields__ if name in event]
    assert list(event) == ["type", *fields]
    assert set(BlockStored.__struct_fields__[:7]) == set(fields)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_arrays_of_any_length(count: int) -> None:
    ids = np.random.default_rng(count).integers(0, 1 << 31, count).astype("<i4")
    keys = [struct.pack(">Q", number) + bytes(24) for number in range(count)]
    got = decode(kv_events.stored("CPU", None, keys, ids.tobytes(), 1), kv_events.removed("DISK", keys))
    stored, removed = got.events
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == ids.tolist()
    assert stored.block_hashes == list(range(count))
    assert removed == BlockRemoved(list(range(count)), "DISK")


def test_hashes_are_the_heads_of_keys_as_unsigned_integers() -> None:
    keys = [b"\xff" * 32, b"\x00" * 7 + b"\x01" + b"\xff" * 24]
    (event,) = decode(kv_events.stored("CPU", keys[0], keys, bytes(8), 1)).events
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [(1 << 64) - 1, 1] == [kv_events.block_hash(key) for key in keys]
    assert event.parent_block_hash == (1 << 64) - 1


def test_ids_that_no_tokenizer_has_do_not_cost_a_router_the_batch() -> None:
    (event,) = decode(kv_events.stored("CPU", None, [key_of(1)], np.array([-1, 7], "<i4").tobytes(), 2)).events
    assert isinstance(event, BlockStored)
    assert event.token_ids == [(1 << 32) - 1, 7]


@pytest.mark.parametrize("sequence", [0, 1, 1 << 40, (1 << 64) - 2])
def test_sequences_travel_big_endian(sequence: int) -> None:
    frame = kv_events.sequence_frame(sequence)
    assert frame == struct.pack(">Q", sequence)
    assert kv_events.replay_start([b"", frame]) == sequence


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"", b""], [b"x", bytes(8)], [b"", bytes(7)], [b"", bytes(9)], [bytes(8)]]
)
def test_what_is_no_replay_request(frames: list[bytes]) -> None:
    assert kv_events.replay_start(frames) is None


def test_the_end_marker_is_vllms() -> None:
    assert (-1).to_bytes(8, "big", signed=True) == kv_events.END
