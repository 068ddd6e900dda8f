"""One engine in two processes' worth of clients: one asks and leases, the other moves bytes."""

from pathlib import Path

import numpy as np
import pytest
from test_client_daemon import FIRST, PAGES, PROMPT, SECOND, client_of, daemon, filled, options, put

from hicache.base.errors import HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.messages import Attach, Attached, Refuse
from hicache.spec.model import ShardSpec
from hicache_client import Client
from hicache_client.leases import LeaseRef
from hicache_daemon.lifeline import check_attach
from tests.daemon_harness import PAGE_TOKENS, SAFETY_S, DaemonProcess, RawClient, layout, model

__all__ = ["daemon"]  # the fixture
GROUP = b"one engine\0\0\0\0\0\0"


def asker(daemon: DaemonProcess, group: bytes = GROUP) -> Client:
    return Client(options(daemon, group=group), model(), layout(), ShardSpec(), None)


def test_bytes_stored_by_one_are_leased_by_the_other_and_loaded_by_the_first(daemon: DaemonProcess) -> None:
    with client_of(daemon, group=GROUP) as (worker, memory), asker(daemon) as scheduler:
        stored = filled(memory, 1)
        put(worker)
        match = scheduler.lookup(PROMPT, PAGES * PAGE_TOKENS)
        ref = scheduler.export(match.lease)
        assert ref is not None
        number = worker.adopt(ref)
        handle = worker.begin_load(number, 0, SECOND)
        assert handle is not None
        assert handle.wait_done()
        assert np.array_equal(memory[:, PAGES : 2 * PAGES], stored)
        worker.forget([number])
        assert scheduler.renew([match.lease]) == 1, "forgetting an adopted lease leaves it with its owner"
        worker.release([worker.adopt(ref)])
        worker.describe()  # the release has been read by now
        assert scheduler.renew([match.lease]) == 0


def test_another_engine_cannot_use_the_lease(daemon: DaemonProcess) -> None:
    with client_of(daemon, group=b"another engine\0\0") as (worker, memory), asker(daemon) as scheduler:
        filled(memory, 2)
        put(worker)
        ref = scheduler.export(scheduler.lookup(PROMPT, PAGES * PAGE_TOKENS).lease)
        assert ref is not None
        before = memory.copy()
        handle = worker.begin_load(worker.adopt(ref), 0, SECOND)
        assert handle is not None
        assert not handle.wait_done(), "refused, and noticed before the deadline"
        assert handle.settled
        assert np.array_equal(memory, before)


def test_a_load_that_comes_to_nothing_leaves_an_adopted_lease_with_its_owner(daemon: DaemonProcess) -> None:
    with client_of(daemon, group=GROUP) as (worker, memory), asker(daemon) as scheduler:
        filled(memory, 3)
        put(worker)
        match = scheduler.lookup(PROMPT, PAGES * PAGE_TOKENS)
        ref = scheduler.export(match.lease)
        assert ref is not None
        number = worker.adopt(ref)
        assert worker.load(number, 1, SECOND) is None, "pages that the lease has not"
        worker.describe()  # a release would have been read by now
        assert scheduler.renew([match.lease]) == 1
        assert worker.renew([number]) == 1, "it stays known here too"
        own = worker.lookup(PROMPT, PAGES * PAGE_TOKENS).lease
        assert worker.load(own, 1, SECOND) is None
        assert worker.renew([own]) == 0, "one's own is given back"
        handle = worker.load(number, 0, SECOND)
        assert handle is not None
        assert handle.wait_done()


def test_a_lease_of_another_boot_is_not_adopted(daemon: DaemonProcess) -> None:
    with client_of(daemon, group=GROUP) as (worker, _):
        assert worker.connect()
        assert worker.adopt(LeaseRef(worker.boot_id ^ 1, 1)) == 0
        assert worker.begin_load(0, 0, SECOND) is None


def test_a_client_without_a_pool_moves_nothing(daemon: DaemonProcess) -> None:
    with asker(daemon) as scheduler:
        assert scheduler.lookup(PROMPT, 1 << 30, lease=False).known_tokens >= 0
        with pytest.raises(ValueError, match="has no pool"):
            scheduler.offer(PROMPT[: PAGES * PAGE_TOKENS * 4], 0, FIRST)
        with pytest.raises(ValueError, match="has no pool"):
            scheduler.load(1, 0, FIRST)
        assert not daemon.describe("sessions")["sessions"][-1]["memory"]


def test_the_askers_end_is_noticed_by_its_lifeline(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as process:
        scheduler = asker(process)
        assert scheduler.connect(SAFETY_S)
        assert len(process.describe("sessions")["sessions"]) == 1
        scheduler.close()
        process.wait_event("session.dropped")
        assert not process.describe("sessions")["sessions"]


def test_a_group_has_sixteen_bytes(daemon: DaemonProcess) -> None:
    with RawClient(daemon) as raw:
        assert isinstance(raw.attach(), Attached)
        refusal = raw.hello(group=b"short")
        assert isinstance(refusal, Refuse)
        assert "group must have 0 or 16 bytes, got 5" in refusal.reason


def test_descriptors_without_memory_are_refused() -> None:
    check_attach(Attach(b"n" * 16, 1, 0, 0), [], Limits())
    with pytest.raises(HiCacheError, match="no file descriptors come with 0 pool_bytes"):
        check_attach(Attach(b"n" * 16, 1, 0, 0), [0], Limits())
    with pytest.raises(HiCacheError, match="pool_bytes must be"):
        check_attach(Attach(b"n" * 16, 1, 0, 4), [], Limits())
