"""What an engine may set, and what the client counts."""

from dataclasses import dataclass
from pathlib import Path

from hicache.protocol.messages import Match

EMPTY = Match(lease=0, known_tokens=0, resumable_tokens=0, l2_tokens=0, l3_tokens=0)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """All times in seconds. `runtime_dir` None: see `paths.runtime_dir`."""

    runtime_dir: Path | None = None
    tenant: str = "default"
    credential: str = ""
    group: bytes = b""  # 16 bytes that the processes of one engine share, and with them their leases; empty: none
    engine: str = ""  # free text for the daemon's status pages
    connect_timeout_s: float = 5.0  # one attempt to register, over however many calls it stretches
    request_timeout_s: float = 1.0  # any one call
    load_timeout_s: float = 30.0  # a whole load, unless the wait names its own deadline
    retry_initial_s: float = 0.1  # first pause after a failure; doubles up to retry_max_s
    retry_max_s: float = 10.0
    fence_slots: int = 256  # transfers that may be open at once


@dataclass(slots=True)
class ClientStats:
    """Counters since the client was made. A failure is always also a miss of its caller."""

    requests: int = 0  # calls that wanted the daemon
    bypassed: int = 0  # of those: not tried, the daemon is known to be away
    timeouts: int = 0
    busy: int = 0  # the daemon said Busy, or no credit or fence slot came free in time
    errors: int = 0  # the daemon answered Error, or the session ended under the request
    late_replies: int = 0  # replies to requests that had been given up
    connects: int = 0  # sessions opened
    losses: int = 0  # sessions lost
