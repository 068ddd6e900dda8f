"""Whatever arrives, decoding gives an envelope or one of three error codes, in bounded memory.

Each example of `test_mutated_frames` and `test_random_frames` decodes several frames in all three directions;
together they see well over 10,000 hostile messages.
"""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol import version, wire

GOLDEN = [
    [bytes.fromhex(line) for line in path.read_text().splitlines()]
    for path in sorted((Path(__file__).parents[1] / "golden" / "wire").glob("*.hex"))
]
LIMITS = Limits(body_bytes=64 * 1024, buffer_bytes=64 * 1024, tokens_per_request=8192, scope_bytes=4096)
CODES = {ErrorCode.MALFORMED, ErrorCode.VERSION, ErrorCode.TOO_LARGE}
PER_EXAMPLE = 5
fuzz = settings(
    max_examples=1200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def decodes(decode: Callable[[], object]) -> bool:
    """Whether it is a message; anything but the three codes escapes."""
    try:
        decode()
    except HiCacheError as error:
        if error.code not in CODES:
            raise
        return False
    return True


def decode_all(frames: list[bytes]) -> int:
    """Decode in every direction; how often it was a message."""
    good = (
        decodes(lambda: wire.decode_client(frames, LIMITS)),
        decodes(lambda: wire.decode_daemon(frames, LIMITS)),
        decodes(lambda: wire.decode_packet(b"".join(frames[:2]), LIMITS)),
    )
    assert 0 <= wire.request_id_of(frames) < 1 << 64
    return sum(good)


def mended(frames: list[bytes]) -> list[bytes]:
    """With a header that is true of the frames, so that the body is what is judged."""
    size = len(frames[1]) if len(frames) > 1 else 0
    head = wire.HEADER.pack(
        b"HC", version.MAJOR, version.MINOR, 0, 0, max(0, len(frames) - 2) & 0xFFFF, 7, 0, size, 1
    )
    return [head, *frames[1:]]


@st.composite
def mutated(draw: st.DrawFn) -> list[bytes]:
    frames = list(draw(st.sampled_from(GOLDEN)))
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(frames) - 1))
        frame = frames[index]
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from(["flip", "cut", "insert", "overwrite", "drop", "double", "swap", "grow"])):
            case "flip" if at < len(frame):
                frames[index] = frame[:at] + bytes([frame[at] ^ 1 << draw(st.integers(0, 7))]) + frame[at + 1 :]
            case "cut":
                frames[index] = frame[:at]
            case "insert":
                frames[index] = frame[:at] + draw(st.binary(max_size=16)) + frame[at:]
            case "overwrite":
                lie = draw(st.sampled_from([b"\xdd", b"\xdf", b"\xc6", b"\xdb"])) + struct.pack(
                    ">I", draw(st.integers(0, 0xFFFFFFFF))
                )
                frames[index] = frame[:at] + lie + frame[at + len(lie) :]
            case "drop" if len(frames) > 1:
                del frames[index]
            case "double":
                frames.insert(index, frame)
            case "swap":
                frames[index], frames[-1] = frames[-1], frames[index]
            case "grow":
                frames[index] = frame + bytes(draw(st.integers(0, 70_000)))
    return mended(frames) if draw(st.booleans()) else frames


@fuzz
@given(st.lists(mutated(), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE))
def test_mutated_frames(messages: list[list[bytes]]) -> None:
    for frames in messages:
        decode_all(frames)


@fuzz
@given(
    st.lists(
        st.lists(st.binary(max_size=80), max_size=24),
        min_size=PER_EXAMPLE,
        max_size=PER_EXAMPLE,
    )
)
def test_random_frames(messages: list[list[bytes]]) -> None:
    for frames in messages:
        decode_all(frames)
        if frames:
            decode_all(mended(frames))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
TAGS = ["hello", "lookup", "extend", "load", "store", "renew", "match", "done", "attach", "attached", "no such verb"]
FIELDS = [
    "tokens_count",
    "limit_tokens",
    "lease",
    "scope",
    "blocks_count",
    "leases",
    "model",
    "layout",
    "boot",
    "epoch",
]


@fuzz
@given(
    st.sampled_from(TAGS),
    st.dictionaries(st.sampled_from(FIELDS), plain, max_size=6),
    st.lists(st.binary(max_size=32), max_size=3),
)
def test_well_formed_msgpack_of_any_shape(tag: str, fields: dict[str, object], buffers: list[bytes]) -> None:
    body = msgspec.msgpack.encode({"t": tag} | fields)
    decode_all(mended([b"", body, *buffers]))


@fuzz
@given(st.sampled_from(GOLDEN), st.integers(0, 255), st.integers(0, 255))
def test_any_version(frames: list[bytes], major: int, minor: int) -> None:
    header = frames[0][:2] + bytes([major, minor]) + frames[0][4:]
    good = decode_all([header, *frames[1:]])
    assert bool(good) == (major == version.MAJOR)


def test_golden_frames_are_messages() -> None:
    assert GOLDEN
    assert all(decode_all(frames) for frames in GOLDEN)


def test_lying_lengths_take_no_memory() -> None:
    """A body that claims 4 billion items, at every place where a length may stand, stays small."""
    huge = [lead + b"\xff\xff\xff\xff" for lead in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")]
    bodies = [
        frames[1][:at] + lie + tail
        for frames in GOLDEN
        for at in range(len(frames[1]))
        for lie in huge
        for tail in (b"", bytes(64))
    ]
    tracemalloc.start()
    try:
        for body in bodies:
            decode_all(mended([b"", body]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, f"decoding {len(bodies)} small bodies took {peak} bytes"


def test_the_longest_lists_take_a_small_multiple_of_the_body() -> None:
    count = LIMITS.body_bytes - 64
    body = b"\x82\xa1t\xa5renew\xa6leases\xdd" + struct.pack(">I", count) + bytes(count)
    tracemalloc.start()
    try:
        decode_all(mended([b"", body]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * len(body)
