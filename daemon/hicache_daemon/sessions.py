"""Which ZeroMQ identity speaks for which session, and how many requests it has open."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Session:
    """What the daemon's edge knows of a session; everything else is the cache state's."""

    id: int
    identity: bytes
    instance: bytes
    epoch: int
    tenant: str
    engine: str
    model: str
    version: int  # of the protocol, as agreed
    pid: int
    opened_s: float
    heard_s: float
    group: bytes = b""  # of one engine's processes
    memory: bool = True  # whether it can load and store
    open: set[int] = field(default_factory=set)  # request ids not yet answered: the credits in use
    requests: int = 0
    silent: bool = False  # its replies cannot be delivered; it is being closed


class Sessions:
    """Two maps that are always in step. An identity speaks for at most one session, the latest."""

    def __init__(self) -> None:
        self._by_id: dict[int, Session] = {}
        self._by_identity: dict[bytes, Session] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_id.values())

    def new_id(self) -> int:
        """Never reused within a boot: a late answer to an old session finds nobody."""
        session_id, self._next_id = self._next_id, self._next_id + 1
        return session_id

    def add(self, session: Session) -> None:
        self._by_id[session.id] = session
        self._by_identity[session.identity] = session

    def of_identity(self, identity: bytes) -> Session | None:
        return self._by_identity.get(identity)

    def get(self, session_id: int) -> Session | None:
        return self._by_id.get(session_id)

    def remove(self, session_id: int) -> Session | None:
        session = self._by_id.pop(session_id, None)
        if session is not None and self._by_identity.get(session.identity) is session:
            del self._by_identity[session.identity]
        return session
