"""Runs writers that die. Reads one JSON job per line on stdin, forks a child for it, reports on stdout.

    pid N                      the child is there
    write|delete N:V …         it is about to write (record N in version V) or delete
    done                       that call returned; every record written was OK
    dead SIGNAL                the child is gone

Forking from a small process without threads makes a kill cost milliseconds, not an interpreter's start.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from hicache.store.base import Bytes, RecordId, RecordMeta, RecordStatus
from hicache.store.lmdb import LmdbOptions, LmdbStore

CAPACITY = 3 << 20
RECORDS = 60
SECRET = b"nursery"


class Quiet:
    def info(self, event: str, **fields: object) -> None: ...

    def warning(self, event: str, **fields: object) -> None: ...


def meta(n: int) -> RecordMeta:
    length = (5_000, 40_000, 65_536, 100_001)[n % 4]
    return RecordMeta(RecordId(n.to_bytes(32, "big"), "full"), None, b"n" * 32, "t", b"f" * 32, length)


def content(n: int, version: int) -> Bytes:
    return np.random.default_rng((n, version)).integers(0, 256, meta(n).length, dtype=np.uint8)


def say(text: str) -> None:
    os.write(1, (text + "\n").encode())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fuse:
    """Kills this process when `point` comes by for the `count`-th time."""

    def __init__(self, point: str, count: int) -> None:
        self._point, self._left = point, count

    def __call__(self, step: str) -> None:
        if step == self._point:
            self._left -= 1
            if self._left == 0:
                die()

    def tear_frames(self) -> None:
        """Let the fatal frame reach the file in part."""
        whole = os.pwritev

        def torn(fd: int, parts: list[memoryview], offset: int) -> int:
            if self._left == 1:
                size = sum(part.nbytes for part in parts)
                os.pwrite(fd, b"".join(parts)[: size // 2], offset)
            self("torn")
            return whole(fd, parts, offset)

        os.pwritev = torn  # type: ignore[assignment]


def open_store(path: str, fuse: Fuse) -> LmdbStore:
    options = LmdbOptions(min_free_bytes=0, grow_bytes=1 << 20, allow_unsafe_fs=True, at_step=fuse)
    return LmdbStore.open(Path(path), CAPACITY, options, SECRET, Quiet())


def churn(store: LmdbStore, seed: int, version: int) -> None:
    """Fill, delete and rewrite near capacity, so that freed space is reused at once. Ends with the fuse."""
    rng = np.random.default_rng(seed)
    present = [int.from_bytes(row.meta.id.key, "big") for row in store.rows()]
    for _ in range(10_000):
        version += 1
        gone = [int(n) for n in rng.permutation(present)[: len(present) // 3]]
        if gone:
            say("delete " + " ".join(f"{n}:0" for n in gone))
            store.delete([meta(n).id for n in gone])
            say("done")
        store.touch([meta(n).id for n in present[:5]])
        present = [n for n in present if n not in gone]
        room = CAPACITY - store.stats().used_bytes
        new: list[int] = []
        for n in rng.permutation(RECORDS).tolist():
            if meta(n).length + 8192 < room and len(new) < 12:
                room -= meta(n).length + 8192
                new.append(n)
        say("write " + " ".join(f"{n}:{version}" for n in new))
        statuses = store.write([meta(n) for n in new], [content(n, version) for n in new])
        if set(statuses) != {RecordStatus.OK}:
            say(f"refused {statuses}")
            os._exit(1)
        say("done")
        present += [n for n in new if n not in present]


def child(job: dict[str, object]) -> None:
    fuse = Fuse(str(job["point"]), int(str(job["count"])))
    if job["point"] == "torn":
        fuse.tear_frames()
    if job["point"] == "open":
        # The count-th file operation that Python makes while the store opens.
        sys.addaudithook(lambda event, _args: fuse("open") if event == "open" or event.startswith("os.") else None)
    store = open_store(str(job["path"]), fuse)
    if job["point"] == "open":
        say("opened")
        os._exit(0)
    churn(store, int(str(job["seed"])), int(str(job["version"])))


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            say(f"pid {os.getpid()}")
            try:
                child(json.loads(line))
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        say(f"dead {os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}")


if __name__ == "__main__":
    main()
