"""Reload: hot keys are applied, cold ones are named until the restart, bad files change nothing."""

import io
import json
from pathlib import Path
from typing import Any

from hicache_daemon.config.settings import Loaded, load_settings
from hicache_daemon.log import LevelGate, make_log
from hicache_daemon.reload import Reloader


class Bench:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.out = io.StringIO()
        self.applied: dict[str, Any] = {}
        appliers = {
            "server.drain": lambda value: self.applied.__setitem__("server.drain", value),
            "server.log_level": lambda value: self.applied.__setitem__("server.log_level", value),
        }
        self.write("")
        log = make_log(LevelGate("debug"), "json", self.out)
        self.reloader = Reloader(self.load().settings, self.load, appliers, log)

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def load(self) -> Loaded:
        return load_settings(self.path, ["server.runtime_dir=/run/x"], env={})

    def reload(self, text: str) -> dict[str, Any]:
        self.write(text)
        self.out.truncate(self.out.seek(0))
        self.reloader.reload()
        return dict(json.loads(self.out.getvalue()))


def test_hot_keys_are_applied_and_the_others_keep_their_values(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "c.yaml")
    told = bench.reload("server: {drain: 5s, log_level: error}\nl2: {copy_threads: 7}\n")
    assert (told["event"], told["need_restart"]) == ("config.reloaded", ["l2.copy_threads"])
    assert bench.applied == {"server.drain": 5.0, "server.log_level": "error"}
    values = bench.reloader.values()
    assert (values["server.drain"], values["server.log_level"], values["l2.copy_threads"]) == ("5s", "error", 2)


def test_a_second_reload_applies_nothing_twice_but_still_names_what_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "c.yaml")
    text = "server: {drain: 5s}\nl2: {copy_threads: 7}\n"
    bench.reload(text)
    bench.applied.clear()
    told = bench.reload(text)
    assert (told["applied"], told["need_restart"], bench.applied) == ([], ["l2.copy_threads"], {})
    told = bench.reload("server: {drain: 6s}\n")
    assert (told["applied"], told["need_restart"]) == (["server.drain"], [])


def test_a_hot_key_that_nothing_applies_is_not_claimed_to_be_in_force(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "c.yaml")
    told = bench.reload("l3: {min_free: 5GiB}\n")
    assert (told["applied"], told["need_restart"]) == ([], ["l3.min_free"])
    assert bench.reloader.values()["l3.min_free"] == "1GiB"


def test_a_bad_file_changes_nothing_and_all_its_errors_are_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "c.yaml")
    before = bench.reloader.values()
    told = bench.reload("server: {drain: soon, log_levle: info}\nl4: {}\n")
    assert told["event"] == "config.reload_refused"
    assert len(told["errors"]) == 3
    assert (bench.reloader.values(), bench.applied) == (before, {})


def test_without_a_source_a_reload_is_refused_aloud(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "c.yaml")
    out = io.StringIO()
    Reloader(bench.load().settings, None, {}, make_log(LevelGate("info"), "json", out)).reload()
    assert json.loads(out.getvalue())["event"] == "config.reload_ignored"
