"""The memcpy setting: added once, kept if an operator chose it, absent where it means nothing."""

import os
import platform
import subprocess
import sys

import pytest

from hicache_daemon.memcpy import THRESHOLD_BYTES, TUNABLE, VARIABLE, tuned_environment

SETTING = f"{TUNABLE}={THRESHOLD_BYTES}"


@pytest.fixture(autouse=True)
def _on_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))


def test_setting_is_added_and_others_are_kept() -> None:
    assert tuned_environment({"A": "1"}) == {"A": "1", VARIABLE: SETTING}
    assert tuned_environment({VARIABLE: "glibc.malloc.check=3"}) == {VARIABLE: f"glibc.malloc.check=3:{SETTING}"}


def test_nothing_is_done_twice_or_against_the_operator() -> None:
    assert tuned_environment({VARIABLE: SETTING}) is None
    assert tuned_environment({VARIABLE: f"{TUNABLE}=99999999"}) is None


@pytest.mark.parametrize(("machine", "libc"), [("aarch64", "glibc"), ("x86_64", "")])
def test_other_machines_are_left_alone(monkeypatch: pytest.MonkeyPatch, machine: str, libc: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    assert tuned_environment({}) is None


def test_restart_keeps_arguments_and_pid_and_ends() -> None:
    code = (
        "import os, sys, platform\n"
        "platform.machine = lambda: 'x86_64'\n"
        "platform.libc_ver = lambda: ('glibc', '2.36')\n"
        "from hicache_daemon.memcpy import VARIABLE, restart_tuned\n"
        "restart_tuned()\n"
        "print(os.getpid(), sys.argv[1], os.environ[VARIABLE])\n"
    )
    environ = {key: value for key, value in os.environ.items() if key != VARIABLE}
    process = subprocess.Popen([sys.executable, "-c", code, "word"], stdout=subprocess.PIPE, text=True, env=environ)
    out, _ = process.communicate(timeout=60)
    assert out.split() == [str(process.pid), "word", SETTING]
