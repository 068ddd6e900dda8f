"""The loop before the copies, where the system lets us.

While every core copies, a lookup's answer takes microseconds to make and milliseconds to be scheduled. A thread
that mostly sleeps and runs for microseconds can go first at no cost to the copies: measured on two cores, p99 of a
lookup under copy 10 → 6 ms, where an empty echo takes 5. It needs CAP_SYS_NICE or RLIMIT_NICE
(systemd: LimitNICE=-10).
"""

import os

LOOP_NICE = -10


def thread_nice() -> int:
    """The calling thread's nice value. Linux keeps one per thread, and a new thread inherits its maker's."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def favour_thread() -> bool:
    """Let the calling thread, and threads it makes from now on, go first. False: the system does not let us."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(LOOP_NICE, thread_nice()))
    except PermissionError:
        return False
    return True


def ordinary_thread(nice: int) -> None:
    """Give back what was inherited from a favoured maker. Needs no right, as it only yields."""
    if thread_nice() < nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
