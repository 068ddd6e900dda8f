"""File descriptors: how many there are, and the door that lets connections in only while some are left.

    client ─connect─► kernel's queue ─readable─► loop: enough free? ─yes─► libzmq accepts ONE ─► …
                                                        └─no─► look again in RETRY_S; the client waits in the queue

libzmq aborts the process when its accept on an ipc listener finds no descriptor (EMFILE), and it accepts on its own
thread as fast as clients connect. Counting afterwards would be a race. So its listener is registered in its epoll set
as one-shot, from here: the kernel then wakes libzmq for one connection and disarms the listener until the loop,
having counted, arms it again. The kernel tells in /proc which epoll set and which registration that is.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import resource
import select
import time
from pathlib import Path
from typing import Any

from hicache.base.errors import ErrorCode, HiCacheError

PER_SESSION = 2  # the control connection and the lifeline
RESERVE = 160  # sockets, epolls, L3, memfds on the way, unbound lifelines, a reload
LOW = 48  # free descriptors under which no connection is let in: what threads open meanwhile comes out of these
RETRY_S = 0.1
_REGISTER_S = 5.0
_CTL_MOD = 3  # EPOLL_CTL_MOD

_libc = ctypes.CDLL(None, use_errno=True)


class _EpollEvent(ctypes.Structure):
    _pack_ = 1  # x86-64; the only machines on which the daemon runs
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def raise_limit() -> int:
    """Raise the soft limit to the hard one; the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # a hard limit above the kernel's own: the soft one stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def sessions_that_fit(limit: int, wanted: int, log: Any) -> int:
    """`wanted` sessions, or as many as `limit` descriptors allow, with a warning. Raises `HiCacheError(CONFIG)`."""
    fit = (limit - RESERVE) // PER_SESSION
    if fit >= wanted:
        return wanted
    remedy = f"raise the process's limit of open files (ulimit -n) to {RESERVE + PER_SESSION * wanted}"
    if fit < 1:
        raise HiCacheError(ErrorCode.CONFIG, f"{limit} file descriptors are too few to serve anybody", remedy)
    log.warning("limits.sessions_lowered", wanted=wanted, sessions=fit, descriptors=limit, remedy=remedy)
    return fit


def free() -> int:
    """How many descriptors may still be opened; 0 also if not even that can be found out."""
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
    return max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - used)


class Door:
    """The one-shot registration of a libzmq listener. All calls on the loop thread."""

    def __init__(self, listener_fd: int, log: Any) -> None:
        """Find the registration and disarm it; waits for libzmq's thread to make it. Nobody may be able to connect
        yet. Raises `HiCacheError(INTERNAL)` if there is none."""
        self._fd = listener_fd
        self._log = log
        self._epoll_fd, self._data = _registration(listener_fd)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._shut = False
        self._set(0)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._fd, self._knock)

    def close(self) -> None:
        """Before the listener is closed. Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _knock(self) -> None:
        """Somebody waits. Arms for one; the loop calls again while anybody waits."""
        self._retry = None
        if self._loop is None:
            return
        if free() >= LOW:
            if self._shut:
                self._shut = False
                self._log.info("control.door_open", free=free())
                self._loop.add_reader(self._fd, self._knock)
            self._set(select.EPOLLIN | select.EPOLLONESHOT)
            return
        if not self._shut:
            self._shut = True
            self._log.warning(
                "control.door_shut",
                free=free(),
                remedy="raise the limit of open files, or look who connects so often",
            )
            self._loop.remove_reader(self._fd)
        self._retry = self._loop.call_later(RETRY_S, self._knock)

    def _set(self, events: int) -> None:
        event = _EpollEvent(events, self._data)
        if _libc.epoll_ctl(self._epoll_fd, _CTL_MOD, self._fd, ctypes.byref(event)):
            raise OSError(ctypes.get_errno(), "epoll_ctl")


def _registration(fd: int) -> tuple[int, int]:
    """(epoll descriptor, its data word) under which `fd` is watched. The loop must not watch it yet."""
    entry = re.compile(rf"^tfd:\s*{fd}\s.*\bdata:\s*([0-9a-f]+)", re.MULTILINE)
    deadline_s = time.monotonic() + _REGISTER_S
    while time.monotonic() < deadline_s:
        for name in os.listdir("/proc/self/fd"):
            try:
                found = entry.search(Path(f"/proc/self/fdinfo/{name}").read_text())
            except OSError:  # the listing's own descriptor, closed by now
                continue
            if found:
                return int(name), int(found[1], 16)
        time.sleep(0.001)
    raise HiCacheError(
        ErrorCode.INTERNAL, "the control socket's listener is in no epoll set", "run on Linux with /proc mounted"
    )
