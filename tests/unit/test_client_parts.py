"""The client's small parts: retry.py, paths.py, buffers.py, its import, its generated half."""

import array
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import hicache_client
from hicache.base.errors import ErrorCode, HiCacheError
from hicache.protocol.messages import Busy, Error, Refuse
from hicache_client import paths
from hicache_client.buffers import error_of, int32s, int32s_per_group, natural
from hicache_client.paths import runtime_dir
from hicache_client.retry import Backoff

ROOT = Path(__file__).parents[2]


# ---- retry ------------------------------------------------------------------------------------------


def test_pauses_double_up_to_the_longest_and_success_forgets_them() -> None:
    backoff = Backoff(0.1, 0.5, lambda: 0.999999)
    pauses = [round(backoff.failed(10.0), 3) for _ in range(5)]
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert backoff.waiting(10.4)
    assert not backoff.waiting(10.5)
    backoff.failed(20.0)
    backoff.succeeded()
    assert not backoff.waiting(20.0)
    assert round(backoff.failed(30.0), 3) == 0.1


def test_jitter_takes_at_most_half() -> None:
    assert Backoff(0.1, 1.0, lambda: 0.0).failed(0.0) == pytest.approx(0.05)


# ---- paths ------------------------------------------------------------------------------------------


def test_runtime_dir_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"HICACHE_RUNTIME_DIR": "/a", "XDG_RUNTIME_DIR": "/x"}
    assert runtime_dir(Path("/c"), env) == Path("/c")
    assert runtime_dir(None, env) == Path("/a")
    assert runtime_dir(None, {"XDG_RUNTIME_DIR": "/x"}) == Path("/x/hicache")
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    assert runtime_dir(None, {"HICACHE_RUNTIME_DIR": ""}) == Path("/tmp/hicache-987654")


def test_a_foreign_default_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths._check_ours(tmp_path)
    owner = os.stat(tmp_path).st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(HiCacheError) as caught:
        paths._check_ours(tmp_path)
    assert caught.value.code == ErrorCode.DENIED
    assert "HICACHE_RUNTIME_DIR" in caught.value.remedy


# ---- buffers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "buffer",
    [
        b"\1\0\0\0\2\0\0\0",
        bytearray(b"\1\0\0\0\2\0\0\0"),
        memoryview(b"\1\0\0\0\2\0\0\0"),
        array.array("i", [1, 2]),
        np.array([1, 2], dtype=np.int32),
        np.array([[1, 2]], dtype="<i4"),
    ],
)
def test_int32_buffers(buffer: bytes) -> None:
    view = int32s(buffer, "tokens")
    assert bytes(view) == b"\1\0\0\0\2\0\0\0"
    assert int32s(buffer[:0], "tokens").nbytes == 0


@pytest.mark.parametrize(
    "buffer",
    [
        np.array([1, 2], dtype=np.int64),
        np.array([1, 2], dtype=np.float32),
        np.array([1, 2], dtype=">i4"),
        np.arange(8, dtype=np.int32)[::2],
        b"\1\0\0",
    ],
)
def test_other_buffers_are_refused(buffer: bytes) -> None:
    with pytest.raises(ValueError, match="tokens must"):
        int32s(buffer, "tokens")


def test_one_buffer_per_group() -> None:
    assert [view.nbytes for view in int32s_per_group([b"", bytes(4)], 2)] == [0, 4]
    with pytest.raises(ValueError, match="2 cache groups"):
        int32s_per_group([b""], 2)
    with pytest.raises(ValueError, match=r"blocks\[1\]"):
        int32s_per_group([b"", b"1"], 2)


def test_natural() -> None:
    assert natural(0, "n") == 0
    assert type(natural(np.int64(7), "n")) is int
    with pytest.raises(TypeError):
        natural(1.5, "n")
    with pytest.raises(ValueError, match="n must"):
        natural(-1, "n")


def test_errors_of_replies() -> None:
    assert error_of(Busy(1.0, "credits")).code == ErrorCode.BUSY
    assert error_of(Refuse("denied", "no", "ask")).remedy == "ask"
    assert error_of(Error("unknown_lease", "gone")).code == ErrorCode.UNKNOWN_LEASE
    assert error_of(Error("code_of_the_future", "x")).code == ErrorCode.INTERNAL


# ---- the package ------------------------------------------------------------------------------------

PROBE = """
import sys
before = set(sys.modules)
import {module}
{use}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
ours = {{".".join(n.split(".")[:2]) for n in sys.modules if n.startswith("hicache.")}}
print(sorted(new), sorted(ours))
"""


def probe(module: str, use: str = "") -> str:
    code = PROBE.format(module=module, use=use)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_else() -> None:
    assert probe("hicache_client") == "['hicache_client'] []"


@pytest.mark.parametrize("use", ["hicache_client.Client", "hicache_client.AsyncClient", "hicache_client.describe"])
def test_the_clients_load_only_zmq_and_msgspec(use: str) -> None:
    everything = "hicache_client.Client, hicache_client.SharedPool, hicache_client.ClientOptions"
    loaded, ours = probe("hicache_client", f"{use}, {everything}").split("] [")
    allowed = {"hicache", "hicache_client", "msgspec", "zmq", "typing_extensions"}  # the last is pyzmq's
    names = {name for name in loaded.strip("[]'").split("', '") if "cython" not in name}
    assert names <= allowed
    assert set(ours.strip("[]'").split("', '")) == {"hicache.base", "hicache.protocol", "hicache.spec"}


def test_every_exported_name_is_there() -> None:
    for name in hicache_client.__all__:
        assert getattr(hicache_client, name) is not None
    with pytest.raises(AttributeError, match="nonesuch"):
        hicache_client.nonesuch  # noqa: B018


# ---- the generated half -----------------------------------------------------------------------------


def unasync() -> ModuleType:
    spec = importlib.util.spec_from_file_location("unasync", ROOT / "tools" / "unasync.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sync_modules_are_those_that_the_async_ones_generate() -> None:
    assert unasync().stale() == [], "run python tools/unasync.py"


def test_generation() -> None:
    source = (
        "class AsyncClient:\n"
        "    async def __aenter__(self) -> 'AsyncClient':\n"
        "        async with lock:  # await stays in comments\n"
        '            return await self.go("async await", AsyncPort())\n'
    )
    assert unasync().generate(source, "aio.py").splitlines()[1:] == [
        "class Client:",
        '    def __enter__(self) -> "Client":',
        "        with lock:  # await stays in comments",
        '            return self.go("async await", SyncPort())',
    ]
