"""What bench_vllm.py compares: vLLM alone, with hicache, with LMCache's server, with Mooncake's store."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from engine import CONNECTOR, environment

from hicache.base.errors import HiCacheError
from hicache_daemon.bench.children import process
from hicache_daemon.bench.transfer_peer import SILENT, await_port, free_ports, lmcache_server

HERE = Path(__file__).parent
START_S, ANSWER_S = 240.0, 300.0
KV_BYTES = 1 << 30
LONGEST = 4352  # tokens of a prompt and its answer
PEER_BYTES = 2 << 30  # what a neighbour's store may keep


@dataclass
class Setting:
    """How an engine is started. `connector`: None for vLLM alone. `wait_s`: what its stores get to end."""

    name: str
    interpreter: Path
    connector: dict[str, Any] | None = None
    environ: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    import_first: tuple[str, ...] = ()


class Contender:
    """One vLLM process, that starts by itself until `await_ready`. A context manager: it is killed at the end."""

    def __init__(self, setting: Setting, model: Path, block: int) -> None:
        self.name, self.setting = setting.name, setting
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": LONGEST,
            "max_num_batched_tokens": LONGEST,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": KV_BYTES,
            "block_size": block,
            "disable_log_stats": False,
            "seed": 0,
            "import_first": setting.import_first,
        }
        if setting.connector is not None:
            arguments["kv_transfer_config"] = {"kv_role": "kv_both"} | setting.connector
        environ = environment(VLLM_CPU_OMP_THREADS_BIND="0-1") | setting.environ
        pipe = subprocess.PIPE
        command = [str(setting.interpreter), str(HERE / "bench_engine.py")]
        self._log: list[str] = []
        self._process = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        threading.Thread(target=self._read_log, daemon=True).start()
        self._arguments = arguments
        self.version = ""

    def await_ready(self) -> None:
        """Raises `ContenderError` if it does not come up."""
        self.version = self._read(START_S)["version"]

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line.rstrip())
            del self._log[:-200]

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContenderError(self._last_words()) from None

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(seconds, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise ContenderError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        return f"{self.name} ended:\n" + "\n".join(self._log[-40:])

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Do something, wait for its answer. Raises `ContenderError`."""
        self._write({"op": op} | arguments)
        return self._read(ANSWER_S)

    def generate(self, *prompts: list[int], max_tokens: int = 1) -> dict[str, Any]:
        """See bench_engine.py."""
        return self.ask("generate", prompts=list(prompts), max_tokens=max_tokens)

    def forget(self) -> None:
        """Only the connector has what was computed until now. Raises `ContenderError` if it still reads it."""
        if not self.ask("reset", wait_s=self.setting.wait_s)["reset"]:
            raise ContenderError(f"{self.name} keeps blocks")

    def __enter__(self) -> "Contender":
        self._write(self._arguments)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._process.poll() is None:
            with contextlib.suppress(ContenderError, subprocess.TimeoutExpired):
                self._write({"op": "exit"})
                self._process.wait(20)
        self._kill()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()


class ContenderError(Exception):
    """An engine's process is gone, or does not do what it must; the message is the end of its log."""


def alone() -> Setting:
    """vLLM with its own prefix cache."""
    return Setting("vllm", Path(sys.executable))


def hicache(runtime_dir: Path) -> Setting:
    """With a daemon that runs."""
    extra = {"kv_connector_extra_config": {"runtime_dir": str(runtime_dir)}}
    return Setting("hicache", Path(sys.executable), CONNECTOR | extra, wait_s=0.05)


@contextlib.contextmanager
def lmcache(folder: Path) -> Iterator[Setting]:
    """`lmcache server` with shared memory, and the connector that LMCache brings for it. Raises `HiCacheError`."""
    with lmcache_server(folder / "lmcache", PEER_BYTES) as server:
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
        connector = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
        first = ("lmcache.integration.vllm.lmcache_mp_connector",)
        yield Setting("lmcache", folder / "python", connector, SILENT, wait_s=0.5, import_first=first)


@contextlib.contextmanager
def mooncake(folder: Path, scratch: Path) -> Iterator[Setting]:
    """`mooncake_master` with the engine's own memory as the store, over TCP. Raises `HiCacheError`."""
    port, http_port, metrics_port = free_ports(3)
    command = [str(folder / "mooncake_master"), "-rpc_address", "127.0.0.1", "-rpc_port", str(port)]
    command += ["-enable_http_metadata_server=true", "-http_metadata_server_host", "127.0.0.1"]
    command += ["-http_metadata_server_port", str(http_port), "-metrics_port", str(metrics_port)]
    config = {
        "metadata_server": f"http://127.0.0.1:{http_port}/metadata",
        "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": PEER_BYTES,
        "local_buffer_size": 256 << 20,
    }
    path = scratch / "mooncake.json"
    path.write_text(json.dumps(config))
    log = scratch / "mooncake.log"
    with process(command, log) as child:
        await_port(port, child, log)
        connector = {"kv_connector": "MooncakeStoreConnector"}
        environ = {"MOONCAKE_CONFIG_PATH": str(path)}
        yield Setting("mooncake", folder / "python", connector, environ, wait_s=1.0)


@contextlib.contextmanager
def peer(make: contextlib.AbstractContextManager[Setting], model: Path, block: int) -> Iterator[Contender]:
    """A neighbour's engine, starting, and what it needs. Raises `PeerAbsentError` if that does not come up."""
    with contextlib.ExitStack() as stack:
        try:
            setting = stack.enter_context(make)
            contender = stack.enter_context(Contender(setting, model, block))
        except (HiCacheError, ContenderError, OSError) as error:
            raise PeerAbsentError(str(error)) from None
        yield contender


class PeerAbsentError(Exception):
    """A neighbour did not come up; the message says why."""
