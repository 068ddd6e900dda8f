"""What happened to which rows, lately: told when a law breaks."""

from collections import deque

from hicache.core.residency import STATES, Int32s, Residency

_NOTES = 4096


class Story:
    """A bounded ring of notes; a note keeps the array of rows it speaks of, so it costs one append."""

    def __init__(self) -> None:
        self._notes: deque[tuple[int, str, Int32s, int]] = deque(maxlen=_NOTES)
        self._event = 0

    def begin(self) -> None:
        """A new event is being handled."""
        self._event += 1

    def note(self, what: str, rows: Int32s, ticket: int = 0) -> None:
        self._notes.append((self._event, what, rows, ticket))

    def of_row(self, residency: Residency, row: int) -> str:
        """All that is remembered of `row`, oldest first, and how it stands now."""
        lines = [
            f"  event {event}: {what}" + (f" (ticket {ticket})" if ticket else "")
            for event, what, rows, ticket in self._notes
            if (rows == row).any()
        ]
        now = (
            f"  now (event {self._event}): key {residency.key[row].hex()[:16]} parent {int(residency.parent[row])} "
            f"l2 {STATES[residency.l2[row]]} {residency.block[:, row].tolist()} l3 {STATES[residency.l3[row]]} "
            f"pins {int(residency.pins[row])} kids {int(residency.kids[row])}"
        )
        return "\n".join([f"story of row {row}:", *lines, now])
