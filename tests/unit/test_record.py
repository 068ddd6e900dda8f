"""Header and row bytes: every field is checked, every flipped bit is seen."""

from dataclasses import replace

import numpy as np
import pytest

from hicache.store import record
from hicache.store.base import RecordId, RecordMeta
from hicache.store.record import Place, Seal

META = RecordMeta(RecordId(b"k" * 32, "full"), b"p" * 32, b"n" * 32, "tenant", b"f" * 32, 12345)
PLACE = Place(8192, 77, b"c" * 16)
SEAL = Seal.derive(b"u" * 16, b"secret")
HEADER = record.pack_header(META, PLACE.ordinal, PLACE.checksum, SEAL)


def test_allocated_bytes_are_a_header_page_and_whole_payload_pages() -> None:
    assert [record.allocated_bytes(n) for n in (1, 4095, 4096, 4097, 737_280, 1 << 20)] == [
        8192,
        8192,
        8192,
        12288,
        741_376,
        (1 << 20) + 4096,
    ]


def test_a_header_fits_its_own_record() -> None:
    assert len(HEADER) == record.HEADER_BYTES
    assert record.header_fault(HEADER, META, PLACE, SEAL) == ""


@pytest.mark.parametrize(
    ("reason", "meta", "place"),
    [
        ("other key", replace(META, id=RecordId(b"K" * 32, "full")), PLACE),
        ("other group", replace(META, id=RecordId(b"k" * 32, "ful")), PLACE),
        ("other namespace", replace(META, namespace=b"N" * 32), PLACE),
        ("other fingerprint", replace(META, fingerprint=b"F" * 32), PLACE),
        ("other length", replace(META, length=12346), PLACE),
        ("other header", replace(META, parent=None), PLACE),
        ("other header", replace(META, tenant="tenan"), PLACE),
        ("other ordinal", META, replace(PLACE, ordinal=78)),
        ("other checksum", META, replace(PLACE, checksum=b"C" * 16)),
    ],
)
def test_a_header_of_another_record_is_named(reason: str, meta: RecordMeta, place: Place) -> None:
    assert record.header_fault(HEADER, meta, place, SEAL) == reason


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    for bit in range(len(HEADER) * 8):
        bad = bytearray(HEADER)
        bad[bit // 8] ^= 1 << bit % 8
        assert record.header_fault(bytes(bad), META, PLACE, SEAL) != ""


def test_headers_of_other_stores_and_secrets_are_refused() -> None:
    for seal in (Seal.derive(b"u" * 16, b"other"), Seal.derive(b"u" * 16, None), Seal.derive(b"v" * 16, b"secret")):
        other = record.pack_header(META, PLACE.ordinal, PLACE.checksum, seal)
        assert record.header_fault(other, META, PLACE, SEAL) in ("bad MAC", "other store uuid")
    assert SEAL.secret_check() != Seal.derive(b"u" * 16, b"other").secret_check()


def test_a_later_version_is_refused_by_name() -> None:
    later = HEADER[:8] + (2).to_bytes(2, "little") + HEADER[10:]
    assert record.header_fault(later, META, PLACE, SEAL) == "other format version"


@pytest.mark.parametrize(
    "meta", [META, replace(META, parent=None), replace(META, tenant=""), replace(META, length=1)]
)
def test_rows_come_back_whole(meta: RecordMeta) -> None:
    key = record.row_key(meta.id)
    row = record.pack_row(key, meta, PLACE, 99)
    assert (len(row), record.row_fault(key, row)) == (record.ROW_BYTES, "")
    fields = record.unpack_row(key, row)
    assert (fields.meta, fields.place, fields.last_use) == (meta, PLACE, 99)
    assert record.scan_row(row) == (99, PLACE.offset, meta.length, PLACE.ordinal)


def test_a_touch_changes_the_time_of_use_alone() -> None:
    key = record.row_key(META.id)
    touched = record.with_last_use(record.pack_row(key, META, PLACE, 99), 100)
    assert touched == record.pack_row(key, META, PLACE, 100)
    assert record.row_fault(key, touched) == ""


def test_every_flipped_bit_of_a_row_is_seen_save_in_the_time_of_use() -> None:
    key = record.row_key(META.id)
    row = record.pack_row(key, META, PLACE, 99)
    for bit in range(64, len(row) * 8):
        bad = bytearray(row)
        bad[bit // 8] ^= 1 << bit % 8
        assert record.row_fault(key, bytes(bad)) != ""
    assert record.row_fault(b"K" + key[1:], row) == "bad row check"
    assert record.row_fault(key, row[:-1]) == "row of another size"
    assert record.row_fault(b"k" * 32, row) == "row of another size"


@pytest.mark.parametrize(
    ("meta", "payload"),
    [
        (META, np.zeros(12344, np.uint8)),
        (META, np.zeros(24690, np.uint8)[::2]),
        (META, np.zeros(12345, np.uint16)),
        (replace(META, length=0), np.zeros(0, np.uint8)),
        (replace(META, namespace=b""), np.zeros(12345, np.uint8)),
        (replace(META, tenant="é" * 33), np.zeros(12345, np.uint8)),
    ],
)
def test_what_a_header_cannot_say_is_not_written(meta: RecordMeta, payload: np.ndarray) -> None:
    assert record.meta_fault(meta, payload) != ""
    assert record.meta_fault(META, np.zeros(12345, np.uint8)) == ""
