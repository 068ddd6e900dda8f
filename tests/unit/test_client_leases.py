"""The client's numbers of leases: its own and adopted ones, also from several threads at once."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from client_world import client_of, eventually, leasing

from hicache.protocol.messages import Busy, DaemonMessage, Load, Release
from hicache_client.leases import LeaseBook, LeaseRef
from hicache_client.testing import Answer, FakeDaemon, FakeRequest, int32_bytes

TOKENS = int32_bytes(range(8))
BLOCKS = (int32_bytes(range(2)),)
THEIRS = 900


def full(request: FakeRequest) -> Iterable[DaemonMessage] | None:
    return [Busy(0.01, "full")] if isinstance(request.message, Load) else leasing(request)


def silent(request: FakeRequest) -> Iterable[DaemonMessage] | None:
    return [] if isinstance(request.message, Load) else leasing(request)


def released(daemon: FakeDaemon) -> set[int]:
    messages = [request.message for request in daemon.seen(Release)]
    return {lease for each in messages if isinstance(each, Release) for lease in each.leases}


@pytest.mark.parametrize("answer", [full, silent])
@pytest.mark.parametrize("slots", [1, 4])
def test_a_load_that_comes_to_nothing_gives_back_its_own_lease_and_no_adopted_one(
    tmp_path: Path, answer: Answer, slots: int
) -> None:
    with (
        FakeDaemon(tmp_path, answer) as daemon,
        client_of(tmp_path, request_timeout_s=0.3, fence_slots=slots) as client,
    ):
        own = client.lookup(TOKENS, 8).lease
        boot = client.boot_id
        theirs = client.adopt(LeaseRef(boot, THEIRS))
        for lease in (theirs, own):  # with one slot and no answer the second finds none
            handle = client.load(lease, 0, BLOCKS)
            assert handle is None or handle.failed
            assert client.connect()
        eventually(lambda: bool(released(daemon)), "its own is released")
        assert THEIRS not in released(daemon)
        assert client.export(own) is None
        assert client.export(theirs) == LeaseRef(boot, THEIRS)
        client.release([theirs])
        eventually(lambda: THEIRS in released(daemon), "asked for, it is released")


def test_a_lease_of_ones_own_stays_ones_own_when_it_is_adopted(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, full) as daemon, client_of(tmp_path) as client:
        own = client.lookup(TOKENS, 8).lease
        ref = client.export(own)
        assert ref is not None
        assert client.adopt(ref) == own
        assert client.load(own, 0, BLOCKS) is None
        eventually(lambda: released(daemon) == {ref.lease}, "it is given back")


def test_threads_agree_on_numbers_and_forget_each_once() -> None:
    book, rounds = LeaseBook(), 300
    numbers: list[list[int]] = []
    forgotten: list[list[int]] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        mine = [book.number(remote, adopted=True) for remote in range(rounds)]
        numbers.append(mine)
        start.wait()
        forgotten.append(book.forget(mine))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert len(numbers) == len(forgotten) == 4
    assert all(each == numbers[0] for each in numbers)
    assert len(set(numbers[0])) == rounds
    assert sorted(lease for each in forgotten for lease in each) == list(range(rounds))
    assert book.number(0) == max(numbers[0]) + 1, "a number is never used for another lease"
    assert book.own([book.number(0)]), "what was forgotten is adopted no more"


def test_adopting_and_forgetting_does_not_wait_for_the_turn(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, silent) as daemon, client_of(tmp_path) as client:
        client.lookup(TOKENS, 8)
        own = client.lookup(TOKENS, 8).lease
        waiting = threading.Thread(target=lambda: client.load(own, 0, BLOCKS))
        waiting.start()
        eventually(lambda: bool(daemon.seen(Load)), "a thread waits for its load's answer and has the turn")
        number = client.adopt(LeaseRef(client.boot_id, THEIRS))
        assert client.export(number) == LeaseRef(client.boot_id, THEIRS)
        client.forget([number, number])
        assert client.export(number) is None
        assert waiting.is_alive()
        daemon.push(daemon.seen(Load)[0], Busy(0.01, "full"))
        waiting.join(20)
        assert not waiting.is_alive()
