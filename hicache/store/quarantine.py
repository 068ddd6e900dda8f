"""What is kept of a record that was set aside: why, its key and its row. Its frame is not kept."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SetAside:
    reason: str
    row_key: bytes
    row: bytes


def pack_entry(entry: SetAside) -> bytes:
    """u16 bytes of reason, reason; u16 bytes of key, key; the row as it was."""
    reason = entry.reason.encode()
    return b"".join(
        (
            len(reason).to_bytes(2, "little"),
            reason,
            len(entry.row_key).to_bytes(2, "little"),
            entry.row_key,
            entry.row,
        )
    )


def unpack_entry(data: bytes) -> SetAside:
    """Raises ValueError for bytes that `pack_entry` did not make."""
    split = 2 + int.from_bytes(data[:2], "little")
    end = split + 2 + int.from_bytes(data[split : split + 2], "little")
    if len(data) < 4 or len(data) < end:
        raise ValueError(f"{len(data)} bytes are not a quarantine entry")
    return SetAside(data[2:split].decode(), data[split + 2 : end], data[end:])
