"""The command line beside a real daemon: what it shows, the shapes of its JSON, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hicache_daemon.cli.app import app
from hicache_daemon.config.settings import hot_keys
from tests.daemon_harness import DaemonProcess, RawClient
from tests.golden.shapes import check_golden

SCRIPT = Path(sys.executable).with_name("hicache")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("cli"), l3=True) as process, RawClient(process).open():
        yield process


def invoke(daemon: DaemonProcess, *args: str) -> Any:
    return CliRunner().invoke(app, [*args, "--runtime-dir", str(daemon.runtime_dir)], env={"COLUMNS": "200"})


@pytest.mark.parametrize("args", [("status",), ("inspect", "l2"), ("inspect", "l3"), ("inspect", "sessions")])
def test_json_shapes_of_a_running_daemon(daemon: DaemonProcess, args: tuple[str, ...]) -> None:
    result = invoke(daemon, *args, "--json")
    assert result.exit_code == 0
    check_golden("-".join(args), json.loads(result.stdout))


def test_status_for_people(daemon: DaemonProcess) -> None:
    result = invoke(daemon, "status")
    assert result.exit_code == 0
    assert re.search(rf"hicached \S+: ready\npid {daemon.process.pid}, up .* s, 1 sessions", result.stdout)
    assert re.search(r"L2 memory .*░ \d+% .* 16\.0 MiB", result.stdout)
    assert re.search(r"L3 disk .* rw .* 64\.0 MiB", result.stdout)
    assert invoke(daemon, "status", "--ready").exit_code == 0


def test_inspect_for_people(daemon: DaemonProcess) -> None:
    assert re.search(r"arena +│ +16\.0 MiB", invoke(daemon, "inspect", "l2").stdout)
    assert re.search(r"mode +│ +rw", invoke(daemon, "inspect", "l3").stdout)
    sessions = invoke(daemon, "inspect", "sessions").stdout
    assert re.search(r"tenant", sessions)
    assert re.search(r"tiny", sessions)


def test_the_installed_script_finds_the_daemon_by_its_variable(daemon: DaemonProcess) -> None:
    env = os.environ | {"HICACHE_RUNTIME_DIR": str(daemon.runtime_dir)}
    done = subprocess.run(
        [SCRIPT, "status", "--json"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["pid"] == daemon.process.pid
    assert done.stderr == ""


def test_a_second_daemon_on_the_same_folder_fails_with_a_reason(daemon: DaemonProcess) -> None:
    args = [SCRIPT, "serve", "--set", f"server.runtime_dir={daemon.runtime_dir}", "--set", "l2.size=1MiB", "--json"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = json.loads(done.stderr.splitlines()[-1])
    assert "already serves" in last["reason"]
    assert last["remedy"]
    assert daemon.describe()["ready"]


def test_a_killed_daemon_leaves_a_socket_that_does_not_hang_the_command_line(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as process:
        process.kill()
        assert process.control.exists()
        result = invoke(process, "status", "--timeout", "0.5")
        assert (result.exit_code, result.stdout) == (1, "")
        assert len(result.stderr.splitlines()) == 1
        assert "hicache serve" in result.stderr


def test_reload_applies_hot_keys_and_names_the_others(tmp_path: Path) -> None:
    options = ["l3.enabled=true", f"l3.path={tmp_path / 'l3'}", "l3.size=64MiB"]
    with DaemonProcess(tmp_path, options) as process:
        hot = "server:\n  log_level: debug\n  drain: 7s\nl3:\n  min_free: 1MiB\n"
        process.config.write_text(hot + "l2:\n  copy_threads: 1\n")
        process.signal(signal.SIGHUP)
        entry = process.wait_event("config.reloaded")
        assert set(entry["applied"]) == hot_keys()  # each key that is documented as hot is
        assert entry["need_restart"] == ["l2.copy_threads"]
        process.config.write_text("server:\n  log_levle: info\n")
        process.signal(signal.SIGHUP)
        refused = process.wait_event("config.reload_refused")
        assert "log_level" in refused["errors"][0]
        assert process.describe()["ready"]
        assert process.stop() == 0
