"""Leases on the client's side: the numbers it uses for them, and how they travel between processes of one engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """The daemon's own number of a lease, and the boot of the daemon that gave it: of another boot it means
    nothing. Only sessions of the same tenant and engine group may use it."""

    boot_id: int
    lease: int


class LeaseBook:
    """The client's numbers of the daemon's leases ("remote"), in one session. Any thread."""

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        """`numbers`: where new ones come from; of one client's sessions no two may give the same."""
        self._new = count(1) if numbers is None else numbers
        self._lock = Lock()
        self._remote: dict[int, int] = {}  # number → remote
        self._numbers: dict[int, int] = {}  # remote → number
        self._adopted: set[int] = set()  # numbers

    def __contains__(self, number: int) -> bool:
        return number in self._remote

    def remote(self, number: int) -> int | None:
        return self._remote.get(number)

    def number(self, remote: int, *, adopted: bool = False) -> int:
        """The number of a lease, drawn if it has none. `adopted`: another process took it; what this client knows
        as its own already stays so."""
        with self._lock:
            number = self._numbers.get(remote, 0)
            if not number:
                number = self._numbers[remote] = next(self._new)
                self._remote[number] = remote
                if adopted:
                    self._adopted.add(number)
            return number

    def own(self, numbers: Sequence[int]) -> list[int]:
        """Without those that were adopted."""
        with self._lock:
            return [number for number in numbers if number not in self._adopted]

    def forget(self, numbers: Sequence[int]) -> list[int]:
        """Drop these; the remote ones of those that were known."""
        found = []
        with self._lock:
            for number in numbers:
                remote = self._remote.pop(number, None)
                if remote is not None:
                    del self._numbers[remote]
                    self._adopted.discard(number)
                    found.append(remote)
        return found

    def clear(self) -> None:
        with self._lock:
            self._remote.clear()
            self._numbers.clear()
            self._adopted.clear()
