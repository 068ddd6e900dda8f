"""Messages to frames and back; the layout and its reasons are in docs/internals/wire.md.

    frame 0    header, 32 bytes, little-endian:
               magic "HC" · major u8 · minor u8 · kind u8 (0) · flags u8 (0) · buffers u16 ·
               request_id u64 · boot_id u64 (0 from clients) · body_len u32 · epoch u32
    frame 1    MessagePack body: one message of the closed union of its direction
    frame 2 …  raw little-endian int32 buffers, as many and as long as the message's counts say

On the lifeline, which keeps packet boundaries, header and body travel in one packet without buffers.

Decoding trusts nothing: whatever the bytes, the result is an `Envelope` or a `HiCacheError` with MALFORMED,
VERSION or TOO_LARGE. It copies no buffer and allocates no more than a small multiple of the body.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import TOKEN_BYTES
from hicache.base.limits import Limits
from hicache.protocol import version
from hicache.protocol.messages import (
    ClientMessage,
    DaemonMessage,
    Extend,
    LifelineMessage,
    Load,
    Lookup,
    Prefetch,
    Release,
    Renew,
    Scope,
    Store,
)

MAGIC = b"HC"
HEADER = struct.Struct("<2sBBBBHQQII")
HEADER_BYTES = HEADER.size
KIND_MESSAGE = 0

Buffer = bytes | memoryview
M = TypeVar("M", ClientMessage, DaemonMessage, LifelineMessage)

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_from_daemon: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)
_from_lifeline: msgspec.msgpack.Decoder[LifelineMessage] = msgspec.msgpack.Decoder(LifelineMessage)


@dataclass(frozen=True, slots=True)
class Envelope(Generic[M]):
    """A decoded message. `buffers` are the frames themselves, uncopied, their lengths checked against the
    message. `boot_id` is 0 from clients; `epoch` is the client's incarnation, in both directions."""

    request_id: int
    boot_id: int
    epoch: int
    message: M
    buffers: tuple[Buffer, ...] = ()


def encode(
    message: ClientMessage | DaemonMessage,
    request_id: int,
    boot_id: int,
    epoch: int,
    buffers: Sequence[Buffer] = (),
) -> list[Buffer]:
    """Frames to send: header, body, then the buffers as they are (not copied, not checked)."""
    body = _encoder.encode(message)
    return [_header(len(buffers), request_id, boot_id, len(body), epoch), body, *buffers]


def decode_client(frames: Sequence[Buffer], limits: Limits) -> Envelope[ClientMessage]:
    """What a client sent. Raises `HiCacheError(MALFORMED | VERSION | TOO_LARGE)`, nothing else."""
    return _decode(frames, limits, _from_client)


def decode_daemon(frames: Sequence[Buffer], limits: Limits) -> Envelope[DaemonMessage]:
    """What the daemon sent. Raises `HiCacheError(MALFORMED | VERSION | TOO_LARGE)`, nothing else."""
    return _decode(frames, limits, _from_daemon)


def encode_packet(message: LifelineMessage, boot_id: int, epoch: int) -> bytes:
    """One packet for the lifeline: header and body, request id 0."""
    body = _encoder.encode(message)
    return _header(0, 0, boot_id, len(body), epoch) + body


def decode_packet(packet: Buffer, limits: Limits) -> Envelope[LifelineMessage]:
    """A lifeline packet. Raises `HiCacheError(MALFORMED | VERSION | TOO_LARGE)`, nothing else."""
    view = memoryview(packet)
    return _decode((view[:HEADER_BYTES], view[HEADER_BYTES:]), limits, _from_lifeline)


def request_id_of(frames: Sequence[Buffer]) -> int:
    """The request id of a message that may not decode, so that its sender can be told; 0 if unreadable.

    Right for every minor of our major; another major may keep it elsewhere, then the answer goes to 0."""
    if not frames or _bytes(frames[0]) != HEADER_BYTES:
        return 0
    magic, major, *_, request_id, _boot, _body_len, _epoch = HEADER.unpack(frames[0])
    return int(request_id) if magic == MAGIC and major == version.MAJOR else 0


def buffer_bytes(message: ClientMessage | DaemonMessage | LifelineMessage) -> tuple[int, ...]:
    """The length in bytes of each buffer that must follow this message, by its `*_count` fields."""
    match message:
        case Lookup() | Extend() | Prefetch():
            return (message.tokens_count * TOKEN_BYTES,)
        case Load():
            return tuple(count * TOKEN_BYTES for count in message.blocks_count)
        case Store():
            return tuple(count * TOKEN_BYTES for count in (message.tokens_count, *message.blocks_count))
        case _:
            return ()


def _header(buffers: int, request_id: int, boot_id: int, body_len: int, epoch: int) -> bytes:
    return HEADER.pack(
        MAGIC, version.MAJOR, version.MINOR, KIND_MESSAGE, 0, buffers, request_id, boot_id, body_len, epoch
    )


def _decode(frames: Sequence[Buffer], limits: Limits, decoder: msgspec.msgpack.Decoder[M]) -> Envelope[M]:
    if len(frames) < 2:
        raise _malformed(f"{len(frames)} frames, expected header, body and buffers")
    if len(frames) > 2 + limits.buffers:
        raise _too_large(f"{len(frames) - 2} buffers, at most {limits.buffers}")
    minor, count, request_id, boot_id, body_len, epoch = _read_header(frames[0])
    body, buffers = frames[1], tuple(frames[2:])
    size = _bytes(body)
    if size > limits.body_bytes:
        raise _too_large(f"a body of {size} bytes, at most {limits.body_bytes}")
    if body_len != size:
        raise _malformed(f"body_len says {body_len}, the body has {size} bytes")
    if count != len(buffers):
        raise _malformed(f"the header says {count} buffers, {len(buffers)} came")
    for index, buffer in enumerate(buffers):
        if _bytes(buffer) > limits.buffer_bytes:
            raise _too_large(f"buffer {index} has {_bytes(buffer)} bytes, at most {limits.buffer_bytes}")
    message = _read_body(decoder, body, minor)
    _check_limits(message, limits)
    _check_buffers(message, buffers)
    return Envelope(request_id, boot_id, epoch, message, buffers)


def _read_header(frame: Buffer) -> tuple[int, int, int, int, int, int]:
    """(minor, buffers, request_id, boot_id, body_len, epoch). The first four bytes mean the same in every
    major, so that a peer of any version can be told what it met."""
    head = bytes(memoryview(frame)[:4])
    if len(head) < 4 or head[:2] != MAGIC:
        raise _malformed(f"the header does not start with {MAGIC!r}")
    if head[2] != version.MAJOR:
        raise _version(f"protocol {head[2]}.{head[3]} came, this side speaks {version.text(version.VERSION)}")
    if _bytes(frame) != HEADER_BYTES:
        raise _malformed(f"a header of {_bytes(frame)} bytes, expected {HEADER_BYTES}")
    _, _, minor, kind, flags, buffers, request_id, boot_id, body_len, epoch = HEADER.unpack(frame)
    if kind != KIND_MESSAGE or flags:
        text = f"kind {kind} with flags {flags}, expected {KIND_MESSAGE} and 0"
        raise _version(text) if minor > version.MINOR else _malformed(text)
    return minor, buffers, request_id, boot_id, body_len, epoch


def _read_body(decoder: msgspec.msgpack.Decoder[M], body: Buffer, minor: int) -> M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:  # RecursionError: skipping deeply nested raw data
        if minor > version.MINOR:
            raise _version(
                f"a message of protocol {version.MAJOR}.{minor} means nothing to "
                f"{version.text(version.VERSION)}: {error}"
            ) from error
        raise _malformed(f"the body is no message: {error}") from error


def _check_limits(message: ClientMessage | DaemonMessage | LifelineMessage, limits: Limits) -> None:
    match message:
        case Lookup() | Extend() | Prefetch() | Store():
            _at_most(message.tokens_count, limits.tokens_per_request, "tokens", message)
        case Renew() | Release():
            _at_most(len(message.leases), limits.leases_per_session, "leases", message)
        case _:
            pass
    match message:
        case Lookup() | Prefetch():
            _at_most(_scope_bytes(message.scope), limits.scope_bytes, "bytes of scope", message)
        case Load():
            _at_most(len(message.blocks_count), limits.groups, "groups", message)
        case Store():
            _at_most(_scope_bytes(message.scope), limits.scope_bytes, "bytes of scope", message)
            _at_most(len(message.blocks_count), limits.groups, "groups", message)
        case _:
            pass


def _at_most(got: int, limit: int, what: str, message: msgspec.Struct) -> None:
    if got > limit:
        raise _too_large(f"{type(message).__name__}: {got} {what}, at most {limit}")


def _scope_bytes(scope: Scope) -> int:
    """Bytes of a scope's identity; each multimodal item counts 8 for its position."""
    if not scope.salt and not scope.lora and not scope.multimodal:
        return 0
    strings = len(scope.salt.encode()) + len(scope.lora.encode())
    return strings + sum(8 + len(digest) for _, digest in scope.multimodal)


def _check_buffers(message: ClientMessage | DaemonMessage | LifelineMessage, buffers: tuple[Buffer, ...]) -> None:
    declared = buffer_bytes(message)
    if len(declared) != len(buffers):
        raise _malformed(f"{type(message).__name__}: {len(buffers)} buffers, its counts say {len(declared)}")
    for index, (want, buffer) in enumerate(zip(declared, buffers, strict=True)):
        if want != _bytes(buffer):
            raise _malformed(
                f"{type(message).__name__}: buffer {index} has {_bytes(buffer)} bytes, its count says {want}"
            )


def _bytes(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _malformed(text: str) -> HiCacheError:
    return HiCacheError(ErrorCode.MALFORMED, text, "this is a bug in the sender, or not a hicache peer")


def _too_large(text: str) -> HiCacheError:
    return HiCacheError(ErrorCode.TOO_LARGE, text, "split the request; Welcome names the limits")


def _version(text: str) -> HiCacheError:
    return HiCacheError(ErrorCode.VERSION, text, "install the same hicache release in the engine and for the daemon")
