"""Clients that nobody closes: dropped alone or in a cycle, left open at exit, or carried over a fork."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from client_world import SAFETY_S, eventually, leasing

from hicache.protocol.messages import Accepted, DaemonMessage, Load, Store
from hicache_client.testing import FakeDaemon, FakeRequest

HERE = Path(__file__).parent
IMPORT_S = 60.0  # torch's, on a busy machine

PRELUDE = """
import asyncio, faulthandler, gc, os, sys, threading
from pathlib import Path
from client_world import LAYOUT, MODEL, POOL_BYTES, ShardSpec, SharedPool, options
from hicache_client import AsyncClient, Client
from hicache_client.testing import int32_bytes
faulthandler.dump_traceback_later(15, exit=True)
directory, state = Path(sys.argv[1]), sys.argv[2]
TOKENS, BLOCKS = int32_bytes(range(8)), [int32_bytes([0, 1])]

class Owner:  # in a cycle with what it owns
    def __init__(self, kind, directory=directory):
        self.pool = SharedPool(POOL_BYTES)
        self.client = kind(options(directory), MODEL, LAYOUT, ShardSpec(), self.pool)
        self.itself = self

def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
"""

DROPPED = {
    "Client": """
def once():
    owner = Owner(Client)
    assert owner.client.connect() == (state != "absent")
    if state == "in_flight":
        handle = owner.client.store(TOKENS, 0, BLOCKS)
        assert handle is not None and not handle.settled

gc.disable()
once()
before = descriptors()
once()
assert descriptors() == before
""",
    "AsyncClient": """
async def once():
    owner = Owner(AsyncClient)
    assert await owner.client.connect() == (state != "absent")
    if state == "in_flight":
        handle = await owner.client.store(TOKENS, 0, BLOCKS)
        assert handle is not None and not handle.settled

async def main():
    await once()
    before = descriptors()
    await once()
    assert descriptors() == before  # and on the same descriptors
    await asyncio.sleep(0.01)  # the loop has no closed one left to look at

gc.disable()
asyncio.run(main())
owner = Owner(AsyncClient)
asyncio.run(owner.client.connect())
del owner
gc.collect()
""",
    "AsyncClient-elsewhere": """
async def main():
    owner = Owner(AsyncClient)
    await owner.client.connect()
    del owner
    before = len(os.listdir("/proc/self/fd"))
    await asyncio.to_thread(gc.collect)
    await asyncio.sleep(0.01)
    assert state == "absent" or len(os.listdir("/proc/self/fd")) < before

gc.disable()
asyncio.run(main())
""",
    "AsyncClient-waiting": """
async def wait(owner):
    await owner.client.connect()
    await owner.client.lookup(TOKENS, 8)
    await asyncio.sleep(3600)
    print(owner)

def once():
    loop = asyncio.new_event_loop()
    loop.create_task(wait(Owner(AsyncClient)))
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()

gc.disable()
once()
before = descriptors()
once()
assert descriptors() == before  # a task that waits keeps nothing alive
""",
    "HiCacheConnector": """
from tests.transformers_world import prompt, tiny_llama
from hicache_client.connectors.transformers import HiCacheConnector

def once(model):
    connector = HiCacheConnector(model, runtime_dir=directory, pool_tokens=600)
    assert connector.connected == (state != "absent")
    if state == "in_flight":
        connector.generate(prompt(40), max_new_tokens=2)

gc.disable()
model = tiny_llama()
once(model)
before = descriptors()
once(model)
assert descriptors() == before
""",
}

AT_EXIT = {
    "Client": "owner = Owner(Client)\nassert owner.client.connect()\n",
    "AsyncClient": "owner = Owner(AsyncClient)\nassert asyncio.run(owner.client.connect())\n",
    "in a call of a thread": """
owner = Owner(Client)
assert owner.client.connect()
began = threading.Event()
def call():
    began.set()
    owner.client.store(TOKENS, 0, BLOCKS)
threading.Thread(target=call, daemon=True).start()
began.wait()
import time
time.sleep(0.1)
""",
    "closed by a late exit handler": """
import atexit
owners = []
atexit.register(lambda: owners[0].client.close())
owners.append(Owner(Client))
assert owners[0].client.connect()
""",
}

FORKED = """
import signal
faulthandler.cancel_dump_traceback_later()  # its thread would be waited for in the child
owner = Owner(Client)
assert owner.client.connect()
child = os.fork()
if child == 0:
    signal.alarm(15)
    if state == "close":
        owner.client.close()
    if state != "exit":
        del owner
        gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert owner.client.connected
assert owner.client.lookup(TOKENS, 8).resumable_tokens == 8  # over the same session
assert owner.client.stats.connects == 1
owner.client.close()
"""


def run(script: str, directory: Path, state: str, timeout_s: float = SAFETY_S) -> None:
    """A process of its own: one that hangs is shown with its stack and is no hang of the tests."""
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(directory), state],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def answering_never(request: FakeRequest) -> Iterable[DaemonMessage] | None:
    """Transfers begin and never end."""
    return [Accepted(1, 2)] if isinstance(request.message, Load | Store) else leasing(request)


@pytest.mark.parametrize("state", ["absent", "idle", "in_flight"])
@pytest.mark.parametrize("kind", DROPPED)
def test_a_dropped_client_hangs_up_and_frees_its_descriptors(tmp_path: Path, kind: str, state: str) -> None:
    script, timeout_s = DROPPED[kind], SAFETY_S
    if kind == "HiCacheConnector":
        if importlib.util.find_spec("transformers") is None:
            pytest.skip("needs transformers")
        timeout_s = IMPORT_S
        script = f"faulthandler.dump_traceback_later({IMPORT_S - 5}, exit=True)\n{script}"
    if state == "absent":
        run(script, tmp_path, state, timeout_s)
        return
    with FakeDaemon(tmp_path, answering_never) as daemon:
        run(script, tmp_path, state, timeout_s)
        assert daemon.sessions
        eventually(lambda: all(s.connection.fileno() < 0 for s in daemon.sessions.values()), "lifelines were closed")


@pytest.mark.parametrize("how", AT_EXIT)
def test_a_program_ends_with_a_client_in_a_cycle(tmp_path: Path, how: str) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [] if isinstance(request.message, Store) else leasing(request)

    with FakeDaemon(tmp_path, answer):
        run(AT_EXIT[how], tmp_path, how)


@pytest.mark.parametrize("state", ["close", "drop", "exit"])
def test_a_forked_process_leaves_the_session_alone(tmp_path: Path, state: str) -> None:
    with FakeDaemon(tmp_path, leasing):
        run(FORKED, tmp_path, state)
