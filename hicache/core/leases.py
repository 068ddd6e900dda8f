"""Leases: a client's right to the pages of one match, until it gives them back, dies or falls silent."""

from collections import OrderedDict
from dataclasses import dataclass

from hicache.base.ids import LeaseId, SessionId
from hicache.core.residency import Int32s


@dataclass(slots=True)
class Lease:
    """`rows` of the pages it pins, from page 0 on. `promised` pages were reported to the client; fewer rows mean
    that a record turned out bad. `tickets` counts loads in flight: none lets it expire. `fingerprint` of the model,
    layout and shard that the pages are of (they may all have gone, and their namespace)."""

    id: LeaseId
    session: SessionId
    namespace: int
    rows: Int32s
    promised: int
    expires_s: float
    fingerprint: bytes = b""
    partial_tokens: int = 0  # of the last row, if that is a page of which only the first tokens are the client's
    tickets: int = 0


class Leases:
    """All leases in order of expiry: each renewal moves to the end, since all live equally long."""

    def __init__(self) -> None:
        self._leases: OrderedDict[LeaseId, Lease] = OrderedDict()
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, session: SessionId, namespace: int, rows: Int32s, expires_s: float) -> Lease:
        lease = Lease(LeaseId(self._next), session, namespace, rows, rows.size, expires_s)
        self._next += 1
        self._leases[lease.id] = lease
        return lease

    def get(self, id: LeaseId) -> Lease | None:
        return self._leases.get(id)

    def all(self) -> list[Lease]:
        return list(self._leases.values())

    def renew(self, lease: Lease, expires_s: float) -> None:
        lease.expires_s = expires_s
        self._leases.move_to_end(lease.id)

    def remove(self, lease: Lease) -> None:
        del self._leases[lease.id]

    def expired(self, now_s: float) -> list[Lease]:
        """Those past their time, oldest first; running tickets or not."""
        found = []
        for lease in self._leases.values():
            if lease.expires_s > now_s:
                break
            found.append(lease)
        return found
