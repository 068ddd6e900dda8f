"""What the connector needs of a client, so that tests can stand in for one; and the real one."""

import contextlib
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from hicache.protocol.messages import Match, Scope
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client import sync_handles
from hicache_client.options import ClientOptions
from hicache_client.pool import SharedPool
from hicache_client.sync import Client


class Handle(Protocol):
    """One transfer under way."""

    @property
    def finished(self) -> bool:
        """Nothing touches the L1 columns any more: done, failed, or the daemon process is gone."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """True once all of it is done; False on failure or when the time is up."""
        ...


class LoadHandle(Handle, Protocol):
    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        """True once layer `layer` lies in L1; False on failure or when the time is up."""
        ...


class StoreHandle(Handle, Protocol):
    def wait_visible(self, timeout_s: float) -> bool:
        """True once lookups see the pages; False on failure or when the time is up."""
        ...


class Port(Protocol):
    """The daemon as seen from one model in one process. Nothing here raises: a fault is None."""

    @property
    def connected(self) -> bool: ...

    def lookup(self, tokens: bytes, limit_tokens: int, scope: Scope) -> Match | None:
        """How far is this prompt known? `tokens` are little-endian int32. None: no daemon, or no answer."""
        ...

    def load(self, lease: int, first_page: int, starts: Sequence[int]) -> LoadHandle | None: ...

    def store(self, tokens: bytes, first_page: int, starts: Sequence[int], scope: Scope) -> StoreHandle | None: ...

    def release(self, lease: int) -> None: ...

    def close(self) -> None: ...


def _deadline(timeout_s: float) -> float:
    return time.monotonic() + timeout_s


class _DaemonLoad:
    def __init__(self, handle: sync_handles.LoadHandle) -> None:
        self._handle = handle

    @property
    def finished(self) -> bool:
        return self._handle.settled

    def wait(self, timeout_s: float) -> bool:
        return self._handle.wait_done(_deadline(timeout_s))

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        return self._handle.wait_layer(layer, _deadline(timeout_s))


class _DaemonStore:
    def __init__(self, handle: sync_handles.StoreHandle) -> None:
        self._handle = handle

    @property
    def finished(self) -> bool:
        return self._handle.settled

    def wait(self, timeout_s: float) -> bool:
        return self._handle.wait_settled(_deadline(timeout_s))

    def wait_visible(self, timeout_s: float) -> bool:
        return self._handle.wait_done(_deadline(timeout_s))


class DaemonPort:
    """`Port` over the sync client and one memfd pool, both opened here. A daemon that is away is said once
    by the client, and found when it comes."""

    def __init__(self, options: ClientOptions, spec: ModelSpec, layout: L1Layout) -> None:
        self.pool = SharedPool(layout.pool_bytes, pretouch=True)
        self.client = Client(options, spec, layout, ShardSpec(), self.pool)
        self.client.connect()

    @property
    def connected(self) -> bool:
        return self.client.connected

    def lookup(self, tokens: bytes, limit_tokens: int, scope: Scope) -> Match | None:
        match = self.client.lookup(tokens, limit_tokens, scope)
        return match if match.lease else None

    def load(self, lease: int, first_page: int, starts: Sequence[int]) -> LoadHandle | None:
        handle = self.client.load(lease, first_page, [_int32(starts)])
        return None if handle is None else _DaemonLoad(handle)

    def store(self, tokens: bytes, first_page: int, starts: Sequence[int], scope: Scope) -> StoreHandle | None:
        handle = self.client.store(tokens, first_page, [_int32(starts)], scope)
        return None if handle is None else _DaemonStore(handle)

    def release(self, lease: int) -> None:
        self.client.release((lease,))

    def close(self) -> None:
        self.client.close()
        with contextlib.suppress(BufferError):  # tensors over the pool keep it until they go themselves
            self.pool.close()


def _int32(starts: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(starts)}i", *starts)
