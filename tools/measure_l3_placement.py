"""Where should payloads of the disk tier live: in LMDB's pages, or in a file beside it? Figures for ADR 0001.

    python tools/measure_l3_placement.py DIRECTORY [--payload BYTES] [--total BYTES] [--batch RECORDS]

Writes `--total` bytes per case below DIRECTORY, which must be on the disk in question, and removes them.
Every case is told in GB/s and as a ratio to memcpy of the same bytes in the same run. Durable writes: each
batch ends with the sync and the index commit that a store needs. Cold: the page cache of the file was dropped.
"""

import argparse
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

HEADER = 512
PAGE = 4096
ROW = bytes(224)
Bytes = npt.NDArray[np.uint8]


def arena(size: int, seed: int | None) -> Bytes:
    """Page-aligned, touched memory."""
    array = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    array[:] = 0 if seed is None else np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return array


class Bench:
    def __init__(self, root: Path, payload: int, total: int, batch: int) -> None:
        self.root, self.length, self.batch = root, payload, batch
        self.count = total // payload
        size = self.count * payload
        self.source, self.target = arena(size, 1), arena(size, None)
        self.blocks = [slice(i * payload, (i + 1) * payload) for i in range(self.count)]
        self.frame = PAGE + -(-payload // PAGE) * PAGE
        self.memcpy_s = min(self._seconds(self._memcpy) for _ in range(3))
        self._tell("memcpy", self.memcpy_s)

    def case(self, name: str, run: Callable[[], None], verify: bool = False) -> None:
        if verify:
            self.target[:] = 0
        self._tell(name, self._seconds(run))
        if verify and not np.array_equal(self.source, self.target):
            raise SystemExit(f"{name}: other bytes than written")

    def _memcpy(self) -> None:
        for block in self.blocks:
            np.copyto(self.target[block], self.source[block])

    def _seconds(self, run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def _tell(self, name: str, seconds: float) -> None:
        rate = self.count * self.length / seconds / 1e9
        print(f"{name:42s} {rate:6.2f} GB/s   {self.memcpy_s / seconds:5.2f} of memcpy", flush=True)

    def batches(self) -> list[range]:
        return [range(at, min(at + self.batch, self.count)) for at in range(0, self.count, self.batch)]


def drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def open_env(path: Path, size: int, readahead: bool = True) -> lmdb.Environment:
    path.mkdir(parents=True, exist_ok=True)
    return lmdb.open(str(path), map_size=size, metasync=False, sync=True, readahead=readahead)


def commit_rows(index: lmdb.Environment, numbers: range) -> None:
    with index.begin(write=True) as txn:
        for i in numbers:
            txn.put(i.to_bytes(8, "big"), ROW)


def measure_lmdb(bench: Bench) -> None:
    """Header and payload as one value of n·4096−16 bytes; put() needs them contiguous."""
    root = bench.root / "lmdb"
    size = 3 * bench.count * bench.frame + (64 << 20)
    frames, index = open_env(root / "frames", size), open_env(root / "index", 1 << 30)
    value = np.zeros(-(-(HEADER + bench.length + 16) // PAGE) * PAGE - 16, np.uint8)

    def write() -> None:
        for numbers in bench.batches():
            with frames.begin(write=True) as txn:
                for i in numbers:
                    value[HEADER : HEADER + bench.length] = bench.source[bench.blocks[i]]
                    txn.put(i.to_bytes(8, "big"), value.data)
            commit_rows(index, numbers)

    bench.case("lmdb: write, new", write)
    for numbers in bench.batches():
        with frames.begin(write=True) as txn:
            for i in numbers:
                txn.delete(i.to_bytes(8, "big"))
    bench.case("lmdb: write, freed pages", write)
    frames.close()
    index.close()
    for readahead in (False, True):
        drop_cache(root / "frames/data.mdb")
        frames = open_env(root / "frames", size, readahead)

        def read(env: lmdb.Environment = frames) -> None:
            with env.begin(buffers=True) as txn:
                for i, block in enumerate(bench.blocks):
                    found = np.frombuffer(txn.get(i.to_bytes(8, "big")) or b"", np.uint8)
                    bench.target[block] = found[HEADER : HEADER + bench.length]

        bench.case(f"lmdb: cold get(), readahead={readahead}", read, verify=True)
        frames.close()


def measure_segment(bench: Bench) -> None:
    """A header page and the payload by pwritev from where it lies; preadv to where it shall lie."""
    root = bench.root / "segment"
    index = open_env(root / "index", 1 << 30)
    path = root / "frames.seg"
    page = mmap.mmap(-1, PAGE)
    for direct in (0, os.O_DIRECT):
        how = "O_DIRECT" if direct else "buffered"
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | direct)
        os.posix_fallocate(fd, 0, bench.count * bench.frame)

        def write(fd: int = fd) -> None:
            for numbers in bench.batches():
                for i in numbers:
                    os.pwritev(fd, [page, bench.source[bench.blocks[i]].data], i * bench.frame)
                os.fdatasync(fd)
                commit_rows(index, numbers)

        bench.case(f"segment: write, new, {how}", write)
        bench.case(f"segment: write, reused, {how}", write)
        for threads in (1, 2):
            drop_cache(path)
            bench.case(f"segment: cold preadv, {how}, {threads} thr", reader(bench, fd, threads), verify=True)
        if not direct:
            bench.case("segment: warm preadv, buffered, 1 thr", reader(bench, fd, 1), verify=True)
        os.close(fd)
    index.close()


def reader(bench: Bench, fd: int, threads: int) -> Callable[[], None]:
    def part(first: int) -> None:
        page = mmap.mmap(-1, PAGE)
        for i in range(first, bench.count, threads):
            os.preadv(fd, [page, bench.target[bench.blocks[i]].data], i * bench.frame)

    def read() -> None:
        workers = [threading.Thread(target=part, args=(first,)) for first in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--payload", type=int, default=1 << 20)
    parser.add_argument("--total", type=int, default=512 << 20)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    root = args.directory / "measure-l3-placement"
    root.mkdir(parents=True)
    try:
        bench = Bench(root, args.payload, args.total, args.batch)
        measure_lmdb(bench)
        measure_segment(bench)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
