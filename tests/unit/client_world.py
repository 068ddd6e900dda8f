"""What the client's tests share: a small model, and a client beside a fake daemon."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hicache.protocol.messages import DaemonMessage, Hello, Lookup, Match
from hicache.spec.group import GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client.options import ClientOptions
from hicache_client.pool import SharedPool
from hicache_client.sync import Client
from hicache_client.testing import FakeDaemon, FakeRequest

POOL_BYTES = 65536
MODEL = ModelSpec("tiny", "r1", (GroupSpec("full", "full", (0, 1), 1, 8, "float32", 4),), 4)
LAYOUT = L1Layout(POOL_BYTES, (GroupLayout("full", (0, 32768), 16, 256, (Axis(2, 128),), 128),))
SAFETY_S = 20.0


def options(directory: Path, **changes: Any) -> ClientOptions:
    """Long deadlines, no pauses: a test that wants a deadline to pass or a pause to hold says so."""
    base = {"request_timeout_s": SAFETY_S, "load_timeout_s": SAFETY_S, "connect_timeout_s": SAFETY_S}
    pauses = {"retry_initial_s": 1e-4, "retry_max_s": 1e-3}
    return ClientOptions(runtime_dir=directory, **(base | pauses | changes))


@contextmanager
def client_of(directory: Path, **changes: Any) -> Iterator[Client]:
    pool = SharedPool(POOL_BYTES)
    client = Client(options(directory, **changes), MODEL, LAYOUT, ShardSpec(), pool)
    try:
        yield client
    finally:
        client.close()
        pool.close()


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another thread does; the limit is a safety net."""
    end = time.monotonic() + SAFETY_S
    while not condition():
        assert time.monotonic() < end, f"never came true: {what}"
        time.sleep(0.001)


def leasing(request: FakeRequest) -> Iterable[DaemonMessage] | None:
    """A daemon that knows 8 tokens of everything and leases them, as lease 40 + request id."""
    if isinstance(request.message, Lookup):
        return [Match(40 + request.request_id, 8, 8, 8, 0)]
    return None


def silent_but_hello(request: FakeRequest) -> Iterable[DaemonMessage] | None:
    return None if isinstance(request.message, Hello) else []


def last(daemon: FakeDaemon) -> FakeRequest:
    return daemon.requests[-1]
