"""The wire's bytes stay what they are. `python tests/golden/test_wire_golden.py` writes the files anew: only for
an addition in a new minor version, never because an old message changed its bytes."""

from pathlib import Path

import msgpack
import msgspec
import pytest

from hicache.base.limits import Limits
from hicache.protocol import wire
from hicache.protocol.messages import (
    Accepted,
    Attach,
    Attached,
    Busy,
    ClientLimits,
    ClientMessage,
    DaemonMessage,
    Describe,
    Description,
    Done,
    Error,
    Extend,
    Goodbye,
    Hello,
    LifelineMessage,
    Load,
    Lookup,
    Match,
    Prefetch,
    Refuse,
    Release,
    Renew,
    Scope,
    Store,
    Welcome,
)
from hicache.spec.group import GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, RopeSpec, ShardSpec

FILES = Path(__file__).parent / "wire"
INSTANCE = bytes(range(16))
TOKEN = bytes(range(16, 32))
REQUEST_ID, BOOT_ID, EPOCH = 0x0102030405060708, 0xFFEEDDCCBBAA9988, 3
SCOPE = Scope(salt="s", lora="sha256:ab", multimodal=((4, b"\xaa" * 32), (9, b"\xbb" * 32)))
MODEL = ModelSpec(
    name="tiny",
    revision="r1",
    groups=(GroupSpec("full", "full", (0, 1), 3, 64, "bfloat16", 16),),
    prefix_granularity=16,
    rope=RopeSpec("default", 10000.0, 64),
)
LAYOUT = L1Layout(
    pool_bytes=196608,
    groups=(GroupLayout("full", (0, 98304), 8, 12288, (Axis(2, 6144), Axis(3, 2048)), 2048),),
)


def int32s(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


TOKENS = int32s(1, 2, 3, 49151, 0)
CLIENT: dict[str, tuple[ClientMessage, tuple[bytes, ...]]] = {
    "hello": (
        Hello((256,), INSTANCE, 3, MODEL, LAYOUT, ShardSpec(1, 2), "acme", "secret", "transformers", INSTANCE, TOKEN),
        (),
    ),
    "lookup": (Lookup(5, 4), (TOKENS,)),
    "lookup_scoped": (Lookup(5, 4, False, SCOPE), (TOKENS,)),
    "extend": (Extend(7, 5, 4096), (TOKENS,)),
    "prefetch": (Prefetch(5, Scope()), (TOKENS,)),
    "load": (Load(7, 2, (3, 1), 4, 99), (int32s(8, 0, 16), int32s(5))),
    "store": (Store(5, 0, (2,), 4, 100, SCOPE), (TOKENS, int32s(1, 2))),
    "renew": (Renew((7, 8)), ()),
    "heartbeat": (Renew(), ()),
    "release": (Release((7,)), ()),
    "describe": (Describe("l3"), ()),
    "goodbye": (Goodbye(), ()),
}
DAEMON: dict[str, DaemonMessage] = {
    "welcome": Welcome(256, 12, ClientLimits(64, 4194304, 1048576, 33554432, 4096, 60.0, 30.0), ("probe",)),
    "refuse": Refuse("version", "no common version", "upgrade"),
    "match": Match(7, 100, 96, 64, 32, 16),
    "accepted": Accepted(21, 6),
    "done": Done(21, 6, 2),
    "busy": Busy(0.25, "credits"),
    "error": Error("unknown_lease", "lease 7 is not held", "look up again"),
    "description": Description(msgspec.Raw(msgspec.msgpack.encode({"schema_version": 1, "boot": "ff"}))),
}
LIFELINE: dict[str, LifelineMessage] = {
    "attach": Attach(INSTANCE, 3, 196608, 256),
    "attached": Attached(BOOT_ID, TOKEN),
    "lifeline_refuse": Refuse("draining", "the daemon is stopping"),
}
NAMES = [*CLIENT, *DAEMON, *LIFELINE]


def frames_of(name: str) -> list[bytes]:
    if name in CLIENT:
        message, buffers = CLIENT[name]
        return [bytes(frame) for frame in wire.encode(message, REQUEST_ID, 0, EPOCH, buffers)]
    if name in DAEMON:
        return [bytes(frame) for frame in wire.encode(DAEMON[name], REQUEST_ID, BOOT_ID, EPOCH)]
    packet = wire.encode_packet(LIFELINE[name], BOOT_ID, EPOCH)
    return [packet[: wire.HEADER_BYTES], packet[wire.HEADER_BYTES :]]


def golden(name: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (FILES / f"{name}.hex").read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_as_recorded(name: str) -> None:
    assert [frame.hex() for frame in frames_of(name)] == [frame.hex() for frame in golden(name)]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_bytes_decode(name: str) -> None:
    frames = golden(name)
    if name in CLIENT:
        envelope = wire.decode_client(frames, Limits())
        assert (envelope.message, envelope.buffers) == CLIENT[name]
        assert (envelope.request_id, envelope.boot_id, envelope.epoch) == (REQUEST_ID, 0, EPOCH)
    elif name in DAEMON:
        decoded = wire.decode_daemon(frames, Limits())
        assert (decoded.message, decoded.boot_id, decoded.epoch) == (DAEMON[name], BOOT_ID, EPOCH)
    else:
        packet = wire.decode_packet(b"".join(frames), Limits())
        assert (packet.message, packet.request_id, packet.boot_id) == (LIFELINE[name], 0, BOOT_ID)


@pytest.mark.parametrize("name", NAMES)
def test_any_msgpack_library_reads_the_body(name: str) -> None:
    body = msgpack.unpackb(golden(name)[1])
    message = CLIENT[name][0] if name in CLIENT else (DAEMON | LIFELINE)[name]
    if isinstance(message, Description):
        assert body == {"t": "description", "data": {"schema_version": 1, "boot": "ff"}}
        return
    expected = {"t": type(message).__struct_config__.tag} | plain(message)
    assert body == expected


def plain(value: object) -> object:
    """A message as the maps, lists and scalars that any reader must see."""
    if isinstance(value, msgspec.Struct):
        return {field: plain(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return value


def test_every_message_has_a_golden_file() -> None:
    union = (*ClientMessage.__args__, *DaemonMessage.__args__, *LifelineMessage.__args__)
    samples = [message for message, _ in CLIENT.values()] + list(DAEMON.values()) + list(LIFELINE.values())
    assert {type(sample) for sample in samples} == set(union)
    assert {path.stem for path in FILES.glob("*.hex")} == set(NAMES)


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    for each in NAMES:
        (FILES / f"{each}.hex").write_text("".join(frame.hex() + "\n" for frame in frames_of(each)))
