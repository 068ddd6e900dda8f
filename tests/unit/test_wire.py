"""hicache/protocol/wire.py and version.py: what is accepted, what is refused with which code."""

import struct

import msgspec
import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol import version, wire
from hicache.protocol.messages import (
    Attach,
    Attached,
    Describe,
    Done,
    Goodbye,
    Load,
    Lookup,
    Release,
    Renew,
    Scope,
    Store,
)

LIMITS = Limits()
TOKENS = struct.pack("<4i", 1, 2, 3, 4)


def refused(frames: list[bytes], limits: Limits = LIMITS) -> HiCacheError:
    with pytest.raises(HiCacheError) as caught:
        wire.decode_client(frames, limits)
    assert caught.value.remedy
    return caught.value


def frames_of(message: object, buffers: tuple[bytes, ...] = ()) -> list[bytes]:
    return list(wire.encode(message, 5, 0, 1, buffers))


def with_header(frames: list[bytes], **changes: int) -> list[bytes]:
    names = ["magic", "major", "minor", "kind", "flags", "buffers", "request_id", "boot_id", "body_len", "epoch"]
    fields = dict(zip(names, wire.HEADER.unpack(frames[0]), strict=True)) | changes
    return [wire.HEADER.pack(*fields.values()), *frames[1:]]


def with_body(body: bytes, buffers: tuple[bytes, ...] = ()) -> list[bytes]:
    header = wire.HEADER.pack(b"HC", version.MAJOR, version.MINOR, 0, 0, len(buffers), 5, 0, len(body), 1)
    return [header, body, *buffers]


def test_buffers_pass_through_uncopied() -> None:
    tokens, blocks = memoryview(TOKENS), memoryview(bytes(8))
    message = Store(4, 0, (2,), 3, 1)
    envelope = wire.decode_client(wire.encode(message, 5, 0, 1, (tokens, blocks)), LIMITS)
    assert envelope.message == message
    assert envelope.buffers[0] is tokens
    assert envelope.buffers[1] is blocks


def test_memoryview_frames_decode() -> None:
    frames = [memoryview(frame) for frame in frames_of(Lookup(4, 4), (TOKENS,))]
    assert wire.decode_client(frames, LIMITS).message == Lookup(4, 4)


@pytest.mark.parametrize(
    ("message", "buffers"),
    [
        (Lookup(5, 4), (TOKENS,)),  # says more than came
        (Lookup(3, 4), (TOKENS,)),  # says less
        (Lookup(4, 4), ()),
        (Lookup(4, 4), (TOKENS, TOKENS)),
        (Lookup(4, 4), (TOKENS + b"\0",)),
        (Load(1, 0, (1, 2), 0, 1), (bytes(4), bytes(4))),
        (Load(1, 0, (1,), 0, 1), (bytes(4), bytes(4))),
        (Store(4, 0, (1,), 0, 1), (TOKENS,)),
        (Store(4, 0, (), 0, 1), (TOKENS, bytes(4))),
        (Goodbye(), (b"",)),
    ],
)
def test_lying_lengths(message: object, buffers: tuple[bytes, ...]) -> None:
    assert refused(frames_of(message, buffers)).code == ErrorCode.MALFORMED


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"XX"},
        {"kind": 1},
        {"flags": 1},
        {"buffers": 2},
        {"buffers": 0},
        {"body_len": 0},
        {"body_len": 0xFFFFFFFF},
    ],
)
def test_bad_headers(changes: dict[str, int]) -> None:
    assert refused(with_header(frames_of(Lookup(4, 4), (TOKENS,)), **changes)).code == ErrorCode.MALFORMED


@pytest.mark.parametrize("size", [0, 1, 3, 4, 31, 33, 64])
def test_header_of_another_size(size: int) -> None:
    frames = frames_of(Goodbye())
    assert refused([(frames[0] * 2)[:size], frames[1]]).code == ErrorCode.MALFORMED


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_frames(count: int) -> None:
    assert refused(frames_of(Goodbye())[:count]).code == ErrorCode.MALFORMED


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x81\xa1t\xa5hallo",
        msgspec.msgpack.encode({"t": "goodbye", "extra": 1}),
        msgspec.msgpack.encode({"t": "lookup", "tokens_count": 4}),
        msgspec.msgpack.encode({"t": "lookup", "tokens_count": "4", "limit_tokens": 4}),
        msgspec.msgpack.encode({"t": "lookup", "tokens_count": -1, "limit_tokens": 4}),
        msgspec.msgpack.encode({"t": "lookup", "tokens_count": 1 << 63, "limit_tokens": 4}),
        msgspec.msgpack.encode({"t": "describe", "what": "passwords"}),
        msgspec.msgpack.encode({"t": "match", "lease": 0}),  # the other direction's
        msgspec.msgpack.encode(Goodbye()) + b"\0",
        b"\x81\xa1t\xa2\xff\xfe",
        b"\x91" * 100_000,
        b"\x82\xa1t\xa5renew\xa6leases\xdd\xff\xff\xff\xff",
    ],
)
def test_bodies_that_are_no_message(body: bytes) -> None:
    assert refused(with_body(body)).code == ErrorCode.MALFORMED


def test_deep_nesting_in_raw_data_is_malformed_not_a_recursion_error() -> None:
    body = b"\x82\xa1t\xabdescription\xa4data" + b"\x91" * 100_000
    with pytest.raises(HiCacheError) as caught:
        wire.decode_daemon(with_body(body), LIMITS)
    assert caught.value.code == ErrorCode.MALFORMED


@pytest.mark.parametrize("size", [0, 15, 17])
def test_instance_has_16_bytes(size: int) -> None:
    packet = wire.encode_packet(Attach(bytes(size), 1, 4096, 1), 0, 1)
    with pytest.raises(HiCacheError) as caught:
        wire.decode_packet(packet, LIMITS)
    assert caught.value.code == ErrorCode.MALFORMED


@pytest.mark.parametrize(
    ("message", "buffers", "limits"),
    [
        (Lookup(4, 4), (TOKENS,), Limits(tokens_per_request=3)),
        (Lookup(4, 4), (TOKENS,), Limits(buffer_bytes=15)),
        (Lookup(4, 4), (TOKENS,), Limits(body_bytes=8)),
        (Lookup(4, 4), (TOKENS,), Limits(buffers=0)),
        (Lookup(4, 4, True, Scope(salt="x" * 9)), (TOKENS,), Limits(scope_bytes=8)),
        (Lookup(4, 4, True, Scope(multimodal=((0, b"x"),))), (TOKENS,), Limits(scope_bytes=8)),
        (Load(1, 0, (0, 0), 0, 1), (b"", b""), Limits(groups=1)),
        (Renew((1, 2)), (), Limits(leases_per_session=1)),
        (Release((1, 2)), (), Limits(leases_per_session=1)),
    ],
)
def test_over_a_limit(message: object, buffers: tuple[bytes, ...], limits: Limits) -> None:
    assert wire.decode_client(frames_of(message, buffers), LIMITS).message == message
    assert refused(frames_of(message, buffers), limits).code == ErrorCode.TOO_LARGE


def test_a_store_of_the_most_groups_fits() -> None:
    groups = LIMITS.groups
    message = Store(4, 0, (1,) * groups, 0, 1)
    frames = frames_of(message, (TOKENS, *[bytes(4)] * groups))
    assert wire.decode_client(frames, LIMITS).message == message


@pytest.mark.parametrize("major", [0, 1, 255])
def test_another_major_is_a_version_error(major: int) -> None:
    error = refused(with_header(frames_of(Goodbye()), major=major))
    assert error.code == ErrorCode.VERSION
    assert version.text(version.VERSION) in error.message


def test_another_major_is_seen_whatever_the_rest_of_its_header() -> None:
    assert refused([b"HC\x07\x00" + bytes(60), b"?"]).code == ErrorCode.VERSION


def test_a_later_minor_is_taken_while_it_means_the_same() -> None:
    frames = with_header(frames_of(Lookup(4, 4), (TOKENS,)), minor=9)
    assert wire.decode_client(frames, LIMITS).message == Lookup(4, 4)


@pytest.mark.parametrize(
    "frames",
    [
        with_header(with_body(msgspec.msgpack.encode({"t": "goodbye", "reason": "done"})), minor=9),
        with_header(with_body(msgspec.msgpack.encode({"t": "commit"})), minor=9),
        with_header(frames_of(Goodbye()), minor=9, kind=1),
        with_header(frames_of(Goodbye()), minor=9, flags=4),
    ],
)
def test_a_later_minor_that_says_more_is_a_version_error(frames: list[bytes]) -> None:
    assert refused(frames).code == ErrorCode.VERSION


def test_request_id_of_bad_messages() -> None:
    good = frames_of(Lookup(4, 4), (TOKENS,))
    assert wire.request_id_of(good) == 5
    assert wire.request_id_of([good[0], b"rubbish"]) == 5
    assert wire.request_id_of(with_header(good, major=1)) == 0
    assert wire.request_id_of([good[0][:31]]) == 0
    assert wire.request_id_of([]) == 0


def test_packets() -> None:
    packet = wire.encode_packet(Attached((1 << 64) - 1, b"t" * 16), (1 << 64) - 1, 4)
    envelope = wire.decode_packet(memoryview(packet), LIMITS)
    assert envelope.message == Attached((1 << 64) - 1, b"t" * 16)
    assert (envelope.boot_id, envelope.epoch) == ((1 << 64) - 1, 4)
    for size in range(len(packet)):
        with pytest.raises(HiCacheError):
            wire.decode_packet(packet[:size], LIMITS)


def test_directions_do_not_mix() -> None:
    with pytest.raises(HiCacheError):
        wire.decode_daemon(frames_of(Describe()), LIMITS)
    assert refused(list(wire.encode(Done(), 5, 1, 1))).code == ErrorCode.MALFORMED


def test_versions_agree_on_the_smaller_minor_of_the_largest_common_major() -> None:
    of = version.number
    assert version.choose([of(1, 4), of(2, 7)], [of(1, 9), of(2, 3)]) == of(2, 3)
    assert version.choose([of(1, 4)], [of(1, 9), of(2, 3)]) == of(1, 4)
    assert version.choose([of(1, 2), of(1, 4)], [of(1, 9)]) == of(1, 4)
    assert version.choose(version.SUPPORTED) == version.VERSION


@pytest.mark.parametrize("offered", [[], [version.number(7, 0)], [1 << 62]])
def test_no_common_version(offered: list[int]) -> None:
    with pytest.raises(HiCacheError) as caught:
        version.choose(offered)
    assert caught.value.code == ErrorCode.VERSION
    assert caught.value.remedy
