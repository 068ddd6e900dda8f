"""`handle.revoke()`: a word in the transfer's own slot, no message, and what the handle then says."""

import threading
import time
from pathlib import Path

import pytest
from client_world import SAFETY_S, client_of, eventually, last, leasing

from hicache.protocol.fence import MAGIC, SLOT_WORDS, STATE_DONE, WORD_GENERATION, WORD_MAGIC, WORD_REVOKED
from hicache.protocol.messages import Accepted, DaemonMessage, Done, Load, Store
from hicache_client.sync import Client
from hicache_client.sync_handles import LoadHandle, StoreHandle
from hicache_client.testing import FakeDaemon, FakeRequest, int32_bytes

TOKENS, BLOCKS = int32_bytes(range(8)), [int32_bytes([3, 4])]


def accepting(request: FakeRequest) -> list[DaemonMessage] | None:
    """Transfers begin, and end when the test says so."""
    if isinstance(request.message, Load | Store):
        return [Accepted(1, 2)]
    return list(leasing(request) or []) or None


def begin(client: Client, kind: str) -> LoadHandle | StoreHandle:
    if kind == "load":
        handle: LoadHandle | StoreHandle | None = client.load(client.lookup(TOKENS, 8).lease, 0, BLOCKS)
    else:
        handle = client.store(TOKENS, 0, BLOCKS)
    assert handle is not None
    return handle


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_revoked_transfer_has_failed_and_settles_when_the_daemon_says_so(tmp_path: Path, kind: str) -> None:
    with FakeDaemon(tmp_path, accepting) as daemon, client_of(tmp_path) as client:
        handle = begin(client, kind)
        request, sent = last(daemon), len(daemon.requests)
        assert not request.fence.revoked
        assert not handle.failed
        thread = threading.Thread(target=handle.revoke)
        thread.start()
        thread.join()
        handle.revoke()
        assert request.fence.revoked
        assert handle.failed
        assert not handle.settled
        begun = time.monotonic()
        assert not handle.wait_done()
        assert not handle.wait_settled(time.monotonic() + 0.01)
        assert time.monotonic() - begun < SAFETY_S / 2
        request.fence.finish(ok=False)
        assert handle.settled
        assert len(daemon.requests) == sent


def test_a_wait_under_way_ends_when_the_load_is_revoked(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, accepting) as daemon, client_of(tmp_path) as client:
        handle = begin(client, "load")
        assert isinstance(handle, LoadHandle)
        last(daemon).fence.progress(1)
        got: list[bool] = []
        waiting = threading.Thread(target=lambda: got.append(handle.wait_layer(1)))
        waiting.start()
        handle.revoke()
        waiting.join(SAFETY_S)
        assert got == [False]
        assert handle.wait_layer(0)  # that one is in place


@pytest.mark.parametrize("kind", ["load", "store"])
def test_what_ended_before_stays_as_it_ended(tmp_path: Path, kind: str) -> None:
    """Also when its end was not seen yet."""
    with FakeDaemon(tmp_path, accepting) as daemon, client_of(tmp_path) as client:
        handle = begin(client, kind)
        last(daemon).fence.finish()
        handle.revoke()
        daemon.push(last(daemon), Done(1, 2))
        assert handle.fence.state == STATE_DONE
        eventually(handle.wait_done, "done")
        assert not handle.failed
        assert handle.settled


def test_a_late_revoke_does_not_hit_the_slots_next_transfer(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, accepting) as daemon, client_of(tmp_path, fence_slots=1) as client:
        first = begin(client, "store")
        last(daemon).fence.finish(ok=False)
        second = begin(client, "store")
        request = last(daemon)
        assert second.fence.slot == first.fence.slot
        first.revoke()
        assert not request.fence.revoked
        assert not second.failed
        second.revoke()
        first.revoke()
        assert request.fence.revoked


def test_the_word_is_the_only_one_that_changes(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, accepting) as daemon, client_of(tmp_path) as client:
        begin(client, "store")
        handle = begin(client, "store")
        session = last(daemon).session
        assert session is not None
        before = session.fences.tolist()
        handle.revoke()
        at = handle.fence.slot * SLOT_WORDS
        before[at + WORD_REVOKED] = handle.fence.generation
        assert session.fences.tolist() == before
        assert (before[at + WORD_MAGIC], before[at + WORD_GENERATION]) == (MAGIC, handle.fence.generation)
