"""Thread priorities: one per thread, inherited, given back."""

import os
import resource
import threading

from hicache_daemon.priority import LOOP_NICE, favour_thread, ordinary_thread, thread_nice


def in_thread(act: "list[object]") -> None:
    base = thread_nice()
    favoured = favour_thread()
    inherited: list[int] = []

    def child() -> None:
        inherited.append(thread_nice())
        ordinary_thread(base)
        inherited.append(thread_nice())

    thread = threading.Thread(target=child)
    thread.start()
    thread.join()
    act += [base, favoured, thread_nice(), inherited]


def test_a_favoured_thread_passes_it_on_and_a_child_gives_it_back() -> None:
    before, seen = thread_nice(), list[object]()
    thread = threading.Thread(target=in_thread, args=(seen,))
    thread.start()
    thread.join()
    base, favoured, now, inherited = seen
    allowed = os.geteuid() == 0 or 20 - resource.getrlimit(resource.RLIMIT_NICE)[0] <= LOOP_NICE
    assert favoured or not allowed
    assert now == (min(LOOP_NICE, base) if favoured else base)  # type: ignore[type-var]
    assert inherited == [now, base]
    assert thread_nice() == before  # of this thread nothing was changed
