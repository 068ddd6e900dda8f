"""The command line: exit codes, one JSON document on stdout and nothing else, every error listed, light imports."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hicache.base.errors import ErrorCode, HiCacheError
from hicache_client import probe
from hicache_daemon import entry
from hicache_daemon.bench.report import Case, report
from hicache_daemon.cli.app import app, main, serve_app, serve_main
from hicache_daemon.cli.output import fact_rows, show_value
from hicache_daemon.cli.reference import commands

ROOT = Path(__file__).parents[2]
NOWHERE = str(Path(tempfile.gettempdir()) / "hicache-of-test-cli")  # never made; any user may
runner = CliRunner()


def invoke(*args: str) -> Any:
    return runner.invoke(app, list(args), env={"HICACHE_RUNTIME_DIR": NOWHERE, "COLUMNS": "200"})


def document(result: Any) -> dict[str, Any]:
    """The whole of stdout as one JSON object that starts with its version."""
    data = json.loads(result.stdout)
    assert next(iter(data)) == "schema_version"
    assert data["schema_version"] == 1
    return dict(data)


def test_help_lists_the_commands_and_costs_little() -> None:
    code = (
        "import sys; sys.argv = ['hicache', '--help']\n"
        "from hicache_daemon.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end\n"
        "heavy = {'numpy', 'torch', 'pydantic', 'zmq', 'lmdb', 'transformers', 'asyncio'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "heavy: []" in done.stdout
    for name in ("serve", "status", "config", "inspect", "bench", "demo"):
        assert re.search(rf"\b{name}\b", done.stdout)


def test_version() -> None:
    assert re.fullmatch(r"hicache \d+\.\d+\.\d+\S*\n", invoke("--version").stdout)


def test_every_command_has_json_and_help() -> None:
    found = dict(commands())
    assert len(found) >= 12
    for name, command in found.items():
        options = {opt for param in command.params for opt in param.opts}
        assert "--json" in options, name
        assert command.help, name


def test_no_command_and_unknown_commands_are_usage_errors() -> None:
    assert invoke("sevre").exit_code == 2
    assert invoke("status", "--jsn").exit_code == 2
    assert invoke("status", "--timeout", "x").exit_code == 2


@pytest.mark.parametrize(
    ("run", "args"),
    [
        (main, ["sevre", "--json"]),
        (main, ["status", "--jsn", "--json"]),
        (main, ["status", "--timeout", "x", "--json"]),
        (serve_main, ["--bogus", "--json"]),
    ],
)
def test_a_usage_error_is_json_too(
    run: Any, args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hicache", *args])
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == 2
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["schema_version", "error"]
    assert data["error"]["code"] == "usage"
    assert data["error"]["message"]


@pytest.mark.parametrize(("args", "code"), [(["config", "schema", "--json"], 0), (["config", "schema"], 0)])
def test_the_entry_point_exits_as_its_command_says(
    args: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hicache", *args])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == code
    assert "lease_ttl" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["hicache", "status", "--runtime-dir", NOWHERE, "--json"])
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "unavailable"


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_hicached_has_help_and_a_version(option: str) -> None:
    shown = runner.invoke(serve_app, [option])
    assert shown.exit_code == 0
    assert "foreground" in shown.stdout
    assert re.fullmatch(r"hicache \d+\.\d+\.\d+\S*\n", runner.invoke(serve_app, ["--version"]).stdout)


@pytest.mark.parametrize("command", ["main", "serve_main"])
@pytest.mark.parametrize("missing", ["typer", "numpy"])
def test_a_base_install_says_what_it_lacks(command: str, missing: str) -> None:
    """In a fresh interpreter that cannot import one of the daemon's modules."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['hicache', *sys.argv[1:]]\n"
        f"from hicache_daemon import entry; entry.{command}()"
    )
    args = ["serve"] if command == "main" else []
    for as_json in ([], ["--json"]):
        command_line = [sys.executable, "-c", code, *args, "--set", "l2.size=1MiB", *as_json]
        env = {"HICACHE_RUNTIME_DIR": NOWHERE}
        done = subprocess.run(command_line, capture_output=True, text=True, timeout=60, check=False, env=env)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        said = json.loads(done.stdout)["error"]["remedy"] if as_json else done.stderr
        assert "install hicache[daemon]" in said


def test_a_module_missing_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hicache_daemon.cli.app", None)
    with pytest.raises(ModuleNotFoundError):
        entry.main()


# ---- config


def test_config_check_accepts(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("l2:\n  size: 64MiB\n")
    result = invoke("config", "check", "--config", str(path))
    assert result.exit_code == 0
    assert "valid" in result.stdout
    data = document(invoke("config", "check", "--config", str(path), "--json"))
    assert data == {"schema_version": 1, "valid": True, "source": str(path), "errors": [], "warnings": []}


def test_config_check_lists_every_error_and_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("l2:\n  sise: 64MiB\n  size: 8\n")
    result = invoke("config", "check", "-c", str(path), "-s", "bogus")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{path}:2: l2.sise: unknown key" in result.stderr
    assert f"{path}:3: l2.size" in result.stderr
    assert "--set bogus" in result.stderr
    assert "3 configuration errors" in result.stderr
    as_json = invoke("config", "check", "-c", str(path), "-s", "bogus", "--json")
    assert as_json.exit_code == 2
    data = document(as_json)
    assert [error["line"] for error in data["errors"]] == [2, 3, None]


def test_config_comes_from_the_environment_too(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("l2: {size: 128MiB}\n")
    result = runner.invoke(app, ["config", "show", "--json"], env={"HICACHE_CONFIG": str(path)})
    value = document(result)["values"]["l2.size"]
    assert value == {"value": "128MiB", "origin": "file", "where": f"{path}:1", "reload": False}


def test_config_show_changed_only() -> None:
    data = document(invoke("config", "show", "--changed", "--json", "--set", "l2.size=64MiB"))
    assert set(data["values"]) == {"l2.size", "server.runtime_dir"}
    shown = invoke("config", "show", "--set", "l2.size=64MiB").stdout
    assert re.search(r"l2\.size +│ 64MiB +│ --set l2\.size=64MiB", shown)


def test_config_schema_names_every_key() -> None:
    assert "limits.lease_ttl" in invoke("config", "schema").stdout
    assert "l2" in document(invoke("config", "schema", "--json"))["schema"]["properties"]


# ---- serve


@pytest.mark.parametrize("target", [app, serve_app])
def test_serve_with_a_bad_configuration_exits_2(target: Any) -> None:
    args = ["serve"] if target is app else []
    result = runner.invoke(target, [*args, "--set", "l2.size=8", "--set", "l3.enabled=true"])
    assert result.exit_code == 2
    assert "l2.size" in result.stderr
    assert "l3.enabled" in result.stderr
    data = json.loads(runner.invoke(target, [*args, "--set", "l2.size=8", "--json"]).stdout)
    assert data["valid"] is False


@pytest.mark.parametrize("args", [["config", "check"], ["config", "show"], ["serve"]])
def test_a_bad_configuration_has_one_shape(args: list[str]) -> None:
    data = document(invoke(*args, "--set", "l2.size=8", "--json"))
    assert list(data) == ["schema_version", "error", "valid", "source", "errors"]
    assert data["error"]["code"] == "config"
    assert data["error"]["message"] == "1 configuration error"
    assert [error["key"] for error in data["errors"]] == ["l2.size"]


# ---- status and inspect


@pytest.mark.parametrize("args", [("status",), ("inspect", "l2"), ("inspect", "l3"), ("inspect", "sessions")])
def test_without_a_daemon_one_line_says_what_to_do(args: tuple[str, ...]) -> None:
    result = invoke(*args)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "hicache serve" in result.stderr
    as_json = invoke(*args, "--json")
    assert as_json.exit_code == 1
    assert document(as_json)["error"]["code"] == "unavailable"


def fake_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any) -> list[str]:
    """A socket file and a probe that answers; returns the arguments that reach the command."""
    (tmp_path / "control.sock").touch()

    def describe(what: str, directory: Path, timeout_s: float) -> Any:
        assert directory == tmp_path
        if isinstance(answer, Exception):
            raise answer
        return answer(what)

    monkeypatch.setattr(probe, "describe", describe)
    return ["--runtime-dir", str(tmp_path)]


def test_status_is_a_headline_tiers_and_counters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = {
        "pool": {"used_bytes": 3 << 29, "arena_bytes": 3 << 30},
        "rows": {"l2": {"ready": 1200, "filling": 3}},
        "l3": {"mode": "off"},
        "counters": {"lookups": 1234, "evicted_l2": 0},
    }
    state = {"schema_version": 1, "version": "9.9", "state": "ready", "ready": True, "uptime_s": 12.5, "cache": cache}
    args = fake_daemon(monkeypatch, tmp_path, lambda what: state | {"reasons": ["l3 is slow"]})
    shown = invoke("status", *args).stdout
    assert "hicached 9.9: ready" in shown
    assert "up 12.5 s" in shown
    assert "! l3 is slow" in shown
    assert re.search(r"L2 memory .* █{10}░{10} 50% .* 1\.5 GiB +│ +3\.0 GiB +│ +1,200 \(\+3\)", shown)
    assert re.search(r"L3 disk +│ off", shown)
    assert re.search(r"lookups +│ +1,234", shown)
    assert "evicted" not in shown


def test_status_of_a_daemon_of_another_version_still_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = {"schema_version": 2, "state": "odd", "cache": {"pool": None, "rows": 7, "counters": {"x": "y"}}}
    args = fake_daemon(monkeypatch, tmp_path, lambda what: state)
    result = invoke("status", *args)
    assert result.exit_code == 0
    assert "odd" in result.stdout
    assert json.loads(invoke("status", *args, "--json").stdout) == state


def test_inspect_shows_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = {
        "schema_version": 1,
        "boot_id": "ab",
        "pool": {"used_bytes": 3 << 29},
        "lag_ms": {"p99": 1.5},
        "views": [],
    }
    args = fake_daemon(monkeypatch, tmp_path, lambda what: state)
    shown = invoke("inspect", "l2", *args).stdout
    assert re.search(r"pool\.used +│ +1\.5 GiB", shown)
    assert re.search(r"lag\.p99 +│ +1\.50 ms", shown)
    assert document(invoke("inspect", "l2", *args, "--json")) == state


def test_status_ready_is_a_health_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for ready, code in ((True, 0), (False, 1)):
        args = fake_daemon(monkeypatch, tmp_path, lambda what, ready=ready: {"schema_version": 1, "ready": ready})
        assert invoke("status", "--ready", *args).exit_code == code
        assert invoke("status", *args).exit_code == 0


def test_inspect_sessions_is_a_table_of_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [{"session": 1, "tenant": "acme", "age_s": 3.0}, {"session": 2, "tenant": "beta", "age_s": 4.0}]
    args = fake_daemon(monkeypatch, tmp_path, lambda what: {"schema_version": 1, what: rows})
    shown = invoke("inspect", "sessions", *args).stdout
    assert re.search(r"session +┃|session +│", shown)
    assert "acme" in shown
    assert "4.0 s" in shown
    args = fake_daemon(monkeypatch, tmp_path, lambda what: {"schema_version": 1, what: []})
    assert invoke("inspect", "sessions", *args).stdout == "no sessions\n"


def test_a_daemon_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = fake_daemon(monkeypatch, tmp_path, HiCacheError(ErrorCode.TIMEOUT, "no answer", "restart it"))
    result = invoke("status", *args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "hicache: no answer; restart it\n"
    assert document(invoke("status", *args, "--json"))["error"]["code"] == "timeout"


# ---- bench


def test_report_has_one_shape() -> None:
    data = report("x", [Case("a", 1.5, "ms"), Case("b", 8.0, "GB/s", limit=10.0, ratio=0.8)])
    assert list(data) == ["schema_version", "name", "machine", "cases"]
    assert list(data["cases"][0]) == ["case", "value", "unit", "limit", "ratio"]
    assert data["machine"]["cores"] >= 1
    assert data["machine"]["memory_bytes"] > 1 << 20


def test_bench_keeps_stdout_for_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Fake:
        @staticmethod
        def run(quick: bool, progress: Any) -> list[Case]:
            assert quick
            progress("a step")
            return [Case("match_32k", 12.0, "µs"), Case("l2_to_l1_page16", 9.0, "GB/s", 10.0, 0.9)]

    monkeypatch.setitem(sys.modules, "hicache_daemon.bench.index", Fake)  # type: ignore[arg-type]
    out = tmp_path / "report.json"
    result = invoke("bench", "index", "--quick", "--json", "--out", str(out))
    assert result.exit_code == 0
    assert "a step" in result.stderr
    assert document(result) == json.loads(out.read_text())
    assert re.search(r"l2_to_l1_page16 +│ +9 +│ GB/s", invoke("bench", "index", "--quick").stdout)


@pytest.mark.parametrize(("name", "word"), [("none/x.json", "no folder"), ("", "is a folder")])
def test_a_report_that_cannot_be_written_is_told_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, word: str
) -> None:
    class Fake:
        @staticmethod
        def run(quick: bool, progress: Any) -> list[Case]:
            raise AssertionError("measured")

    monkeypatch.setitem(sys.modules, "hicache_daemon.bench.index", Fake)  # type: ignore[arg-type]
    result = invoke("bench", "index", "--out", str(tmp_path / name), "--json")
    assert result.exit_code == 2
    assert word in document(result)["error"]["message"]
    assert "--out" in invoke("bench", "index", "--out", str(tmp_path / name)).stderr


def test_a_report_that_fails_to_be_written_still_shows_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "report.json"

    class Fake:
        @staticmethod
        def run(quick: bool, progress: Any) -> list[Case]:
            out.mkdir()  # something took the name meanwhile
            return [Case("match_32k", 12.0, "µs")]

    monkeypatch.setitem(sys.modules, "hicache_daemon.bench.index", Fake)  # type: ignore[arg-type]
    result = invoke("bench", "index", "--out", str(out), "--json")
    assert result.exit_code == 1
    assert document(result)["cases"][0]["value"] == 12.0
    assert "cannot write" in result.stderr


# ---- rendering


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("used_bytes", 2048, ("used", "2.0 KiB")),
        ("p99_ms", 1.234, ("p99", "1.23 ms")),
        ("hit_ratio", 0.5, ("hit", "50.0%")),
        ("age_s", 1.0, ("age", "1.0 s")),
        ("count", 1234567, ("count", "1,234,567")),
        ("ready", True, ("ready", "yes")),
        ("reason", None, ("reason", "–")),
    ],
)
def test_values_carry_their_unit(name: str, value: Any, shown: tuple[str, str]) -> None:
    assert show_value(name, value) == shown


def test_facts_are_flattened() -> None:
    facts = {"a": {"b_bytes": 1}, "list": [1, 2], "records": [{"x": 1}], "none": []}
    assert fact_rows(facts) == [("a.b", "1 B"), ("list", "1, 2"), ("none", "–")]
