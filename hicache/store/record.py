"""Bytes of one record: the header that stands before each payload, and the row that the index keeps for it.

A frame is one header page followed by the payload, padded to whole pages:

    | header 512 B | zeros to 4096 | payload, `length` B | (unwritten) to the next multiple of 4096 |

so that every payload starts on a page and could be read past the page cache straight into an aligned block.
Header and row both carry the payload's checksum and the ordinal of the write: a frame that an older write of
the same key left behind (a lost write) does not fit its row. Everything is little-endian. The layout is
described field by field in docs/internals/l3-format.md and frozen by tests/golden.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from hicache.base.ids import DIGEST_BYTES
from hicache.store.base import Bytes, RecordId, RecordMeta, StoredRow

FORMAT_VERSION = 1
PAGE_BYTES = 4096
HEADER_BYTES = 512
MAC_BYTES = 32
CHECKSUM_BYTES = 16
UUID_BYTES = 16
NAME_BYTES = 64  # group and tenant, UTF-8
MAX_PAYLOAD_BYTES = 1 << 31  # one preadv moves at most 2 GiB - 4 KiB; blocks are far smaller

MAGIC = b"HICACHE\x00"
_SIGNED_BYTES = HEADER_BYTES - MAC_BYTES
_HEADER = struct.Struct("<8sHHI32s32s32s32sQQ16s16sBBBx64s64s156x")
# last_use comes first and is the only field that changes in place, so the check covers the rest.
_ROW = struct.Struct("<QQHBB4xQQQ16s32s32s32s64s")
ROW_BYTES = _ROW.size
_ROW_CHECK = struct.Struct("<Q")
_FIXED_FROM = 16  # after last_use and the check itself
_ABSENT = bytes(DIGEST_BYTES)


def allocated_bytes(length: int) -> int:
    """Bytes that a payload of `length` bytes takes on the medium: a header page and whole payload pages."""
    return PAGE_BYTES + -(-length // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame lies and what its row says of it besides the meta."""

    offset: int  # of the frame's header page in the segment file, bytes
    ordinal: int  # of the write; larger is later
    checksum: bytes  # xxh3-128 of the payload


@dataclass(frozen=True, slots=True)
class Seal:
    """What makes a header this store's own: its uuid, and a MAC key derived from the cluster secret."""

    uuid: bytes
    mac_key: bytes

    @staticmethod
    def derive(uuid: bytes, secret: bytes | None) -> "Seal":
        """Without a secret the MAC is an unkeyed digest: it then catches accidents, not forgery."""
        key = hashlib.blake2b(secret, person=b"hicache-l3-mac").digest() if secret else b""
        return Seal(uuid, key)

    def mac(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=MAC_BYTES, key=self.mac_key).digest()

    def secret_check(self) -> str:
        """Tells at open whether the store was made with this secret, without telling the secret."""
        return self.mac(b"hicache-l3-secret-check" + self.uuid)[:16].hex()


def payload_checksum(payload: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(payload.data)


def meta_fault(meta: RecordMeta, payload: Bytes) -> str:
    """Why this record cannot be written, or "". The header is made from the meta, so the meta must fit it."""
    digests = (meta.id.key, meta.namespace, meta.fingerprint, meta.parent or _ABSENT)
    if any(len(d) != DIGEST_BYTES for d in digests):
        return f"key, parent, namespace and fingerprint must be {DIGEST_BYTES} bytes"
    for name, text in (("group", meta.id.group), ("tenant", meta.tenant)):
        raw = text.encode()
        if len(raw) > NAME_BYTES or (name == "group" and not raw):
            return f"{name} must be 1 to {NAME_BYTES} bytes of UTF-8, got {len(raw)}"
    if not 0 < meta.length <= MAX_PAYLOAD_BYTES:
        return f"length must be 1 to {MAX_PAYLOAD_BYTES}, got {meta.length}"
    if payload.dtype.itemsize != 1 or not payload.flags.c_contiguous or payload.nbytes != meta.length:
        return f"payload must be {meta.length} contiguous bytes, got {payload.nbytes} of {payload.dtype}"
    return ""


def pack_header(meta: RecordMeta, ordinal: int, checksum: bytes, seal: Seal) -> bytes:
    """The 512 bytes that stand before a payload."""
    body = _pack_body(meta, ordinal, checksum, seal)
    return body + seal.mac(body)


def _pack_body(meta: RecordMeta, ordinal: int, checksum: bytes, seal: Seal) -> bytes:
    group, tenant = meta.id.group.encode(), meta.tenant.encode()
    return _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        0,  # codec: 0 = raw
        meta.id.key,
        meta.parent or _ABSENT,
        meta.namespace,
        meta.fingerprint,
        meta.length,
        ordinal,
        seal.uuid,
        checksum,
        meta.parent is not None,
        len(group),
        len(tenant),
        group,
        tenant,
    )


def header_fault(header: bytes, meta: RecordMeta, place: Place, seal: Seal) -> str:
    """Why this header is not the one that was written for `meta` at `place`, or "".

    It must be, byte for byte, the header that a write would make; no field is left unchecked.
    """
    body = _pack_body(meta, place.ordinal, place.checksum, seal)
    if hmac.compare_digest(header, body + seal.mac(body)):
        return ""
    return _name_fault(header, meta, place, seal)


def _name_fault(header: bytes, meta: RecordMeta, place: Place, seal: Seal) -> str:
    """What is wrong with a header that is known to be wrong, for logs and the quarantine."""
    if header[:8] != MAGIC:
        return "bad magic"
    if int.from_bytes(header[8:10], "little") != FORMAT_VERSION:
        return "other format version"
    if not hmac.compare_digest(seal.mac(header[:_SIGNED_BYTES]), header[_SIGNED_BYTES:]):
        return "bad MAC"
    fields = _HEADER.unpack_from(header)
    key, namespace, fingerprint, length, ordinal, uuid, checksum = (fields[i] for i in (4, 6, 7, 8, 9, 10, 11))
    expected = (
        ("key", key, meta.id.key),
        ("group", fields[15][: fields[13]], meta.id.group.encode()),
        ("namespace", namespace, meta.namespace),
        ("fingerprint", fingerprint, meta.fingerprint),
        ("length", length, meta.length),
        ("store uuid", uuid, seal.uuid),
        ("ordinal", ordinal, place.ordinal),
        ("checksum", checksum, place.checksum),
    )
    for name, got, want in expected:
        if got != want:
            return f"other {name}"
    return "other header"


# ---- index rows ---------------------------------------------------------------------------------------


def row_key(id: RecordId) -> bytes:
    """Key of a row in the index: the page key, then the group's name. At most 96 bytes."""
    return id.key + id.group.encode()


def pack_row(db_key: bytes, meta: RecordMeta, place: Place, last_use: int) -> bytes:
    tenant = meta.tenant.encode()
    row = _ROW.pack(
        last_use,
        0,
        FORMAT_VERSION,
        meta.parent is not None,
        len(tenant),
        place.offset,
        meta.length,
        place.ordinal,
        place.checksum,
        meta.parent or _ABSENT,
        meta.namespace,
        meta.fingerprint,
        tenant,
    )
    return row[:8] + _row_check(db_key, row) + row[_FIXED_FROM:]


def _row_check(db_key: bytes, row: bytes) -> bytes:
    # LMDB pages carry no checksum of their own; without this a flipped bit could move a row's extent onto
    # another record's and the next write would land there.
    return _ROW_CHECK.pack(xxhash.xxh3_64_intdigest(db_key + row[_FIXED_FROM:]))


def row_fault(db_key: bytes, row: bytes) -> str:
    """Why these bytes are not a row of this version, or ""."""
    if len(row) != ROW_BYTES or not DIGEST_BYTES < len(db_key) <= DIGEST_BYTES + NAME_BYTES:
        return "row of another size"
    if row[8:16] != _row_check(db_key, row):
        return "bad row check"
    if int.from_bytes(row[16:18], "little") != FORMAT_VERSION:
        return "row of another version"
    return ""


@dataclass(frozen=True, slots=True)
class RowFields:
    meta: RecordMeta
    place: Place
    last_use: int


def unpack_row(db_key: bytes, row: bytes) -> RowFields:
    """Fields of a row for which `row_fault` said nothing."""
    values = _ROW.unpack(row)
    return RowFields(_meta_of(db_key, values), Place(values[5], values[7], values[8]), values[0])


def stored_row(db_key: bytes, row: bytes) -> StoredRow:
    """The same, as the store's callers see it."""
    values = _ROW.unpack(row)
    return StoredRow(_meta_of(db_key, values), allocated_bytes(values[6]), values[0])


def _meta_of(db_key: bytes, values: tuple[Any, ...]) -> RecordMeta:
    _, _, _, has_parent, tenant_len, _, length, _, _, parent, namespace, fingerprint, tenant = values
    return RecordMeta(
        RecordId(db_key[:DIGEST_BYTES], db_key[DIGEST_BYTES:].decode()),
        parent if has_parent else None,
        namespace,
        tenant[:tenant_len].decode(),
        fingerprint,
        length,
    )


_SCAN = struct.Struct("<Q8xHBB4xQQQ")


def scan_row(row: bytes) -> tuple[int, int, int, int]:
    """(last_use, offset, length, ordinal) of a row, without building objects: for the scan at open."""
    last_use, _, _, _, offset, length, ordinal = _SCAN.unpack_from(row)
    return last_use, offset, length, ordinal


def with_last_use(row: bytes, last_use: int) -> bytes:
    return last_use.to_bytes(8, "little") + row[8:]
