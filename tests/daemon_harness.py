"""A real daemon in a subprocess, and a client that speaks to it frame by frame.

`RawClient` is not hicache_client on purpose: these tests send what a proper client never would.
"""

import fcntl
import itertools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import zmq

from hicache.base.limits import Limits
from hicache.protocol import fence as fence_words
from hicache.protocol.messages import (
    Accepted,
    Attach,
    Attached,
    ClientMessage,
    DaemonMessage,
    Describe,
    Description,
    Done,
    Hello,
    Load,
    Lookup,
    Match,
    Refuse,
    Release,
    Store,
    Welcome,
)
from hicache.protocol.version import VERSION
from hicache.protocol.wire import Envelope, decode_daemon, decode_packet, encode, encode_packet
from hicache.spec.group import GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec

SAFETY_S = 60.0
LIMITS = Limits()

PAGE_TOKENS = 16
LAYERS, HEADS, HEAD_DIM = 3, 2, 8
POOL_BLOCKS = 64
ROW_BYTES = HEAD_DIM * 4
BLOCK_LAYER_BYTES = 2 * HEADS * PAGE_TOKENS * ROW_BYTES


def model(name: str = "tiny", revision: str = "r1") -> ModelSpec:
    group = GroupSpec("full", "full", tuple(range(LAYERS)), HEADS, HEAD_DIM, "float32", PAGE_TOKENS)
    return ModelSpec(name, revision, (group,), PAGE_TOKENS)


def layout(blocks: int = POOL_BLOCKS) -> L1Layout:
    """Layer after layer, in each [block][K/V][head][token][dim]: a block×layer is one run."""
    layer_bytes = blocks * BLOCK_LAYER_BYTES
    axes = (Axis(2, HEADS * PAGE_TOKENS * ROW_BYTES), Axis(HEADS, PAGE_TOKENS * ROW_BYTES))
    group = GroupLayout(
        group="full",
        layer_offsets=tuple(layer * layer_bytes for layer in range(LAYERS)),
        blocks=blocks,
        block_stride=BLOCK_LAYER_BYTES,
        axes=axes,
        run_bytes=PAGE_TOKENS * ROW_BYTES,
    )
    return L1Layout(LAYERS * layer_bytes, (group,))


def tokens(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype("<i4").tobytes()


def int32(values: Sequence[int] | range) -> bytes:
    return np.asarray(values, "<i4").tobytes()


class DaemonProcess:
    """`hicached` with a configuration below `root`. A context manager: it is killed at the end."""

    def __init__(
        self,
        root: Path,
        overrides: Sequence[str] = (),
        l3: bool = False,
        wait: bool = True,
        nofile: tuple[int, int] | None = None,
    ) -> None:
        """`nofile`: its limits of open files, soft and hard; None: as ours."""
        self._nofile = nofile
        self.runtime_dir = root / "run"
        self.config = root / "hicache.yaml"
        self.log_path = root / "hicached.log"
        self.overrides = ["l2.size=16MiB", f"server.runtime_dir={self.runtime_dir}", "server.log_format=json"]
        if l3:
            self.overrides += ["l3.enabled=true", f"l3.path={root / 'l3'}", "l3.size=64MiB", "l3.min_free=0"]
            self.overrides += ["l3.allow_unsafe_fs=true"]  # checkouts live in containers too
        self.overrides += overrides
        if not self.config.exists():
            self.config.write_text("server: {}\n")
        self.process = self._start()
        if wait:
            self.wait_ready()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", "from hicache_daemon.cli.app import serve_main; serve_main()"]
        command += ["--config", str(self.config)]
        for override in self.overrides:
            command += ["--set", override]
        if self._nofile is not None:
            command = ["prlimit", "--nofile={}:{}".format(*self._nofile), "--", *command]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(command, stderr=log, stdout=log)

    @property
    def control(self) -> Path:
        return self.runtime_dir / "control.sock"

    def describe(self, what: str = "status") -> dict[str, Any]:
        with RawClient(self) as client:
            return client.describe(what)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SAFETY_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.log()}"
            if self.control.exists() and self.describe()["ready"]:
                return
            time.sleep(0.02)
        raise AssertionError(f"not ready:\n{self.log()}")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's entries of one kind."""
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def wait_event(self, name: str, count: int = 1) -> dict[str, Any]:
        deadline = time.monotonic() + SAFETY_S
        while time.monotonic() < deadline:
            found = self.events(name)
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.02)
        raise AssertionError(f"{name} was not logged {count} times:\n{self.log()}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(SAFETY_S)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """A new process with the same configuration, after the old one ended."""
        assert self.process.poll() is not None
        self.process = self._start()
        self.wait_ready()

    def rss_bytes(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE  # without shared memory: the arena

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def __enter__(self) -> "DaemonProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.kill()


def memfd(size: int) -> int:
    fd = os.memfd_create("raw-client", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class RawClient:
    """One DEALER, and after `open` one session with a pool and fences."""

    _instances: Iterator[int] = itertools.count(1)

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._context = zmq.Context()
        self.sock = self._context.socket(zmq.DEALER)
        self.sock.setsockopt(zmq.LINGER, 0)
        self.sock.connect(f"ipc://{daemon.control}")
        self.lifeline: socket.socket | None = None
        self.instance = os.urandom(16)
        self.epoch = 0
        self.boot_id = 0
        self.token = b""  # of the last Attached
        self.fence_slots = 16
        self._fence = itertools.count()
        self._requests = itertools.count(1)
        self._stash: list[Envelope[DaemonMessage]] = []

    # ---- frames -------------------------------------------------------------------------------------

    def send(self, message: ClientMessage, buffers: Sequence[bytes] = (), request: int | None = None) -> int:
        request = next(self._requests) if request is None else request
        self.sock.send_multipart(encode(message, request, 0, self.epoch, buffers))
        return request

    def receive(self, request: int | None = None) -> DaemonMessage:
        """The next reply, or the next one to `request`; replies to others are kept for later."""
        for envelope in self._stash:
            if request is None or envelope.request_id == request:
                self._stash.remove(envelope)
                return envelope.message
        while True:
            assert self.sock.poll(int(SAFETY_S * 1000)), f"no reply to {request}:\n{self._daemon.log()}"
            envelope = decode_daemon(self.sock.recv_multipart(), LIMITS)
            self.boot_id = envelope.boot_id
            if request is None or envelope.request_id == request:
                return envelope.message
            self._stash.append(envelope)

    def ask(self, message: ClientMessage, buffers: Sequence[bytes] = ()) -> DaemonMessage:
        return self.receive(self.send(message, buffers))

    def describe(self, what: str = "status") -> dict[str, Any]:
        reply = self.ask(Describe(what))  # type: ignore[arg-type]
        assert isinstance(reply, Description), reply
        return msgspec.msgpack.decode(reply.data, type=dict[str, Any])

    # ---- a session ----------------------------------------------------------------------------------

    def attach(self) -> Attached | Refuse:
        """Connect a new lifeline with fresh memory, under the next epoch."""
        self.hang_up()
        self.epoch += 1
        pool_fd, fence_fd = memfd(layout().pool_bytes), memfd(self.fence_slots * fence_words.SLOT_BYTES)
        self.pool = np.frombuffer(mmap.mmap(pool_fd, layout().pool_bytes), np.uint8)
        words = np.frombuffer(mmap.mmap(fence_fd, self.fence_slots * fence_words.SLOT_BYTES), np.uint64)
        self.fences = words.reshape(self.fence_slots, fence_words.SLOT_WORDS)
        self.lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lifeline.settimeout(SAFETY_S)
        self.lifeline.connect(str(self._daemon.runtime_dir / "lifeline.sock"))
        message = Attach(self.instance, self.epoch, layout().pool_bytes, self.fence_slots)
        socket.send_fds(self.lifeline, [encode_packet(message, 0, self.epoch)], [pool_fd, fence_fd])
        os.close(pool_fd)
        os.close(fence_fd)
        answer = decode_packet(self.lifeline.recv(65536), LIMITS).message
        assert isinstance(answer, Attached | Refuse)
        if isinstance(answer, Attached):
            self.token = answer.token
        return answer

    def hello(self, spec: ModelSpec | None = None, lay: L1Layout | None = None, **fields: Any) -> DaemonMessage:
        spec, lay = spec or model(), lay or layout()
        fields = {"token": self.token} | fields
        return self.ask(Hello((VERSION,), self.instance, self.epoch, spec, lay, engine="raw", **fields))

    def open(self) -> "RawClient":
        attached = self.attach()
        assert isinstance(attached, Attached), attached
        welcome = self.hello()
        assert isinstance(welcome, Welcome), welcome
        return self

    # ---- transfers ----------------------------------------------------------------------------------

    def new_fence(self) -> tuple[int, int]:
        number = next(self._fence)
        slot, generation = number % self.fence_slots, number + 1
        self.fences[slot, :] = 0
        self.fences[slot, fence_words.WORD_GENERATION] = generation
        self.fences[slot, fence_words.WORD_MAGIC] = fence_words.MAGIC
        return slot, generation

    def block(self, at: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of one L1 block: view of shape (layers, bytes)."""
        return self.pool.reshape(LAYERS, POOL_BLOCKS, BLOCK_LAYER_BYTES)[:, at]

    def store(self, data: bytes, blocks: Sequence[int] | range) -> tuple[Accepted, Done]:
        """Store all pages of `data` from these blocks; waits for Done."""
        slot, generation = self.new_fence()
        message = Store(len(data) // 4, 0, (len(blocks),), slot, generation)
        request = self.send(message, (data, int32(blocks)))
        accepted, done = self.receive(request), self.receive(request)
        assert isinstance(accepted, Accepted), accepted
        assert isinstance(done, Done), done
        assert self.fences[slot, fence_words.WORD_STATE] == fence_words.STATE_DONE
        return accepted, done

    def lookup(self, data: bytes, lease: bool = True) -> Match:
        match = self.ask(Lookup(len(data) // 4, len(data) // 4, lease), (data,))
        assert isinstance(match, Match), match
        return match

    def load(self, lease: int, blocks: Sequence[int] | range) -> tuple[Accepted, Done]:
        slot, generation = self.new_fence()
        request = self.send(Load(lease, 0, (len(blocks),), slot, generation), (int32(blocks),))
        accepted, done = self.receive(request), self.receive(request)
        assert isinstance(accepted, Accepted), accepted
        assert isinstance(done, Done), done
        assert self.fences[slot, fence_words.WORD_STATE] == fence_words.STATE_DONE
        assert self.fences[slot, fence_words.WORD_LAYERS_DONE] == LAYERS
        return accepted, done

    def release(self, lease: int) -> None:
        assert isinstance(self.ask(Release((lease,))), Done)

    def hang_up(self) -> None:
        if self.lifeline is not None:
            self.lifeline.close()
            self.lifeline = None

    def hung_up_on(self) -> bool:
        """Wait for the daemon to close the lifeline."""
        assert self.lifeline is not None
        try:
            return self.lifeline.recv(1) == b""
        except ConnectionResetError:
            return True

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.hang_up()
        self.sock.close()
        self._context.term()
