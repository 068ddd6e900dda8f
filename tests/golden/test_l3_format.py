"""The disk format is frozen: bytes of version 1, written out. A change here is a new FORMAT_VERSION."""

import hashlib

from hicache.store import record
from hicache.store.base import RecordId, RecordMeta
from hicache.store.record import Place, Seal

META = RecordMeta(
    RecordId(bytes(range(32)), "full"),
    bytes(range(32, 64)),
    bytes(range(64, 96)),
    "acme",
    bytes(range(96, 128)),
    737_280,
)
PLACE = Place(0x0102030405000, 0x1122334455667788, bytes(range(128, 144)))
SEAL = Seal.derive(bytes(range(144, 160)), b"golden secret")

HEADER = (
    "48494341434845000100000200000000"  # magic, version 1, 512 bytes, codec 0
    + bytes(range(32)).hex()  # key
    + bytes(range(32, 64)).hex()  # parent
    + bytes(range(64, 96)).hex()  # namespace
    + bytes(range(96, 128)).hex()  # fingerprint
    + "00400b0000000000"  # length
    + "8877665544332211"  # ordinal
    + bytes(range(144, 160)).hex()  # store uuid
    + bytes(range(128, 144)).hex()  # payload checksum
    + "01040400"  # has parent, bytes of group, of tenant
    + "66756c6c".ljust(128, "0")
    + "61636d65".ljust(128, "0")
    + "00" * 156
)
MAC = "b61c972f3354913cf61309aa2f4be9f2cea0972c07aea0ebbcc1cb98c85c570f"

ROW = (
    "6300000000000000"  # last use
    + "ba9b16bf4c67860b"
    + "01000104"  # version, has parent, bytes of tenant
    + "00000000"
    + "0050403020100000"  # offset
    + "00400b0000000000"  # length
    + "8877665544332211"  # ordinal
    + bytes(range(128, 144)).hex()
    + bytes(range(32, 64)).hex()
    + bytes(range(64, 96)).hex()
    + bytes(range(96, 128)).hex()
    + "61636d65".ljust(128, "0")
)


def test_header_bytes() -> None:
    header = record.pack_header(META, PLACE.ordinal, PLACE.checksum, SEAL)
    assert header[:480].hex() == HEADER
    assert header[480:].hex() == MAC


def test_mac_is_keyed_blake2b_over_the_first_480_bytes() -> None:
    key = hashlib.blake2b(b"golden secret", person=b"hicache-l3-mac").digest()
    assert hashlib.blake2b(bytes.fromhex(HEADER), digest_size=32, key=key).hexdigest() == MAC


def test_row_bytes() -> None:
    key = record.row_key(META.id)
    assert key == bytes(range(32)) + b"full"
    assert record.pack_row(key, META, PLACE, 99).hex() == ROW


def test_a_frame_is_a_header_page_and_payload_pages() -> None:
    assert (record.FORMAT_VERSION, record.HEADER_BYTES, record.PAGE_BYTES, record.ROW_BYTES) == (1, 512, 4096, 224)
    assert record.allocated_bytes(737_280) == 741_376
