"""Deaths: of the daemon in the middle of work, of engines in the middle of a transfer."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.protocol.messages import Describe, Store
from tests.daemon_harness import (
    PAGE_TOKENS,
    SAFETY_S,
    DaemonProcess,
    RawClient,
    int32,
    tokens,
)

ENGINE = """
import os, signal, sys
from pathlib import Path
from tests.daemon_harness import *

class Named:
    def __init__(self, runtime_dir):
        self.runtime_dir, self.control = runtime_dir, runtime_dir / "control.sock"
    def log(self):
        return ""

step = sys.argv[2]
client = RawClient(Named(Path(sys.argv[1])))
client.attach()
if step != "attach":
    client.hello()
if step == "store":
    for number in range(40):
        slot, generation = client.new_fence()
        data = tokens(32 * PAGE_TOKENS, seed=number)
        client.send(Store(len(data) // 4, 0, (32,), slot, generation), (data, int32(range(32))))
if step == "load":
    data = tokens(32 * PAGE_TOKENS, seed=99)
    client.store(data, range(32))
    for number in range(20):
        lease = client.lookup(data).lease
        slot, generation = client.new_fence()
        client.send(Load(lease, 0, (32,), slot, generation), (int32(range(32)),))
print("there", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def pattern(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, 1 << 12, np.uint8)


@pytest.mark.parametrize("step", ["attach", "hello", "store", "load"])
def test_an_engine_killed_at_any_step_costs_nothing_but_its_session(tmp_path: Path, step: str) -> None:
    with DaemonProcess(tmp_path, l3=True) as daemon:
        for round_ in range(1, 4):
            engine = subprocess.run(
                [sys.executable, "-c", ENGINE, str(daemon.runtime_dir), step],
                stdout=subprocess.PIPE,
                timeout=SAFETY_S,
                check=False,
                cwd=Path(__file__).parents[2],
            )
            assert engine.returncode == -signal.SIGKILL
            assert engine.stdout == b"there\n"
            if step != "attach":
                daemon.wait_event("session.dropped", count=round_)
        status = daemon.describe()
        while status["lifelines"]["bound"] or status["lifelines"]["unbound"] or status["cache"]["leases"]:
            status = daemon.describe()
        mappings = Path(f"/proc/{daemon.process.pid}/maps").read_text()
        assert "raw-client" not in mappings  # its pool and fences are given back at once
        with RawClient(daemon).open() as client:
            data = tokens(4 * PAGE_TOKENS, seed=1000)
            client.store(data, range(4))
            assert client.lookup(data).resumable_tokens == 64
        assert daemon.stop() == 0
        assert not daemon.events("event.failed"), daemon.log()


def test_killed_during_writes_the_daemon_serves_only_whole_pages_afterwards(tmp_path: Path) -> None:
    """Whatever reached L3 before the kill reads back as it was stored, or not at all."""
    prompts = {number: tokens(8 * PAGE_TOKENS, seed=number) for number in range(6)}
    with DaemonProcess(tmp_path, l3=True) as daemon:
        for kills in range(4):
            with RawClient(daemon).open() as client:
                for number, data in prompts.items():
                    for at in range(8):
                        client.block(at)[:] = np.resize(pattern(100 * number + at), client.block(at).shape)
                    client.store(data, range(8))
                if kills % 2:  # in the middle of copies and of writes that were just begun
                    for number in range(10):
                        slot, generation = client.new_fence()
                        data = tokens(32 * PAGE_TOKENS, seed=5000 + 100 * kills + number)
                        client.send(Store(len(data) // 4, 0, (32,), slot, generation), (data, int32(range(32))))
                daemon.kill()
            daemon.restart()
            with RawClient(daemon).open() as client:
                for number, data in prompts.items():
                    match = client.lookup(data)
                    pages = match.resumable_tokens // PAGE_TOKENS
                    if not pages:
                        continue
                    client.load(match.lease, range(20, 20 + pages))
                    for at in range(pages):
                        got = client.block(20 + at)
                        assert np.array_equal(got, np.resize(pattern(100 * number + at), got.shape))
                    client.release(match.lease)
        assert daemon.stop() == 0


def test_a_stopped_client_that_reads_nothing_is_dropped_and_blocks_nobody(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ["limits.requests_in_flight=4"]) as daemon, RawClient(daemon).open() as deaf:
        with RawClient(daemon).open() as client:
            for sent in range(200_000):  # replies pile up: first in the kernel, then in the bounded pipe
                deaf.send(Describe("config"))
                if sent % 500 == 0 and daemon.events("session.dropped"):
                    break
            assert daemon.wait_event("session.dropped")["reason"] == "the client does not read its replies"
            assert client.lookup(tokens(20)).resumable_tokens == 0
        assert deaf.hung_up_on()
        assert os.path.exists(daemon.control)
