"""The configuration: precedence, strictness, origins, cross-checks, and that the files in configs/ are right."""

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from hicache.base.limits import Limits
from hicache_client.paths import runtime_dir
from hicache_daemon.config.catalog import keys, nearest
from hicache_daemon.config.checks import HostFacts, check, read_host
from hicache_daemon.config.errors import ConfigError
from hicache_daemon.config.schema import default_yaml, json_schema
from hicache_daemon.config.settings import (
    ConfigErrors,
    Loaded,
    Settings,
    changed_keys,
    flatten,
    hot_keys,
    load_settings,
)
from hicache_daemon.config.source import StrictLoader

ROOT = Path(__file__).parents[2]
BIG = HostFacts(memory_limit=1 << 46, memory_available=1 << 46, cores=64, filesystem=lambda path: "ext4")
RUNTIME_DIR = Path(tempfile.gettempdir()) / "hicache-of-test-config"  # never made; any user may
ENV = {"HICACHE_RUNTIME_DIR": str(RUNTIME_DIR)}


def load(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    host: HostFacts = BIG,
) -> Loaded:
    return load_settings(path, overrides, ENV | dict(env or {}), host)


def errors_of(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    host: HostFacts = BIG,
) -> tuple[ConfigError, ...]:
    with pytest.raises(ConfigErrors) as caught:
        load(path, overrides, env, host)
    return caught.value.errors


@pytest.fixture
def write(tmp_path: Path):
    def writer(text: str) -> Path:
        path = tmp_path / "hicache.yaml"
        path.write_text(text)
        return path

    return writer


# ---- precedence and origins


def test_defaults_need_nothing() -> None:
    loaded = load()
    assert loaded.settings.l2.size == 1 << 30
    assert loaded.settings.server.runtime_dir == RUNTIME_DIR
    assert loaded.settings.to_limits() == Limits()
    assert loaded.origins["l2.size"].kind == "default"
    assert loaded.origins["server.runtime_dir"].where == "HICACHE_RUNTIME_DIR"
    assert loaded.warnings == ()


def test_later_sources_win_and_every_value_has_an_origin(write) -> None:
    path = write("l2:\n  size: 2GiB\n  copy_threads: 3\n  parent: 1MiB\nserver:\n  drain: 5s\n")
    loaded = load(path, ["l2.size=4GiB"], {"HICACHE__L2__SIZE": "3GiB", "HICACHE__L2__PARENT": "2MiB"})
    assert loaded.settings.l2.size == 4 << 30
    assert loaded.settings.l2.parent == 2 << 20
    assert loaded.settings.l2.copy_threads == 3
    assert loaded.settings.server.drain == 5.0
    kinds = {key: (origin.kind, origin.where) for key, origin in loaded.origins.items()}
    assert kinds["l2.size"] == ("option", "--set l2.size=4GiB")
    assert kinds["l2.parent"] == ("environment", "HICACHE__L2__PARENT")
    assert kinds["l2.copy_threads"] == ("file", f"{path}:3")
    assert kinds["l2.hugepages"] == ("default", "")
    assert set(kinds) == set(flatten(loaded.settings))


def test_the_last_of_two_options_wins() -> None:
    assert load(overrides=["l2.size=2GiB", "l2.size=3GiB"]).settings.l2.size == 3 << 30


def test_a_whole_section_may_be_set_as_one_value() -> None:
    loaded = load(overrides=["tenants={acme: {}, beta: {}}"])
    assert list(loaded.settings.tenants) == ["acme", "beta"]


def test_empty_sections_and_files_are_defaults(write) -> None:
    assert load(write("")).settings == load().settings
    assert load(write("l2:\nl3:\ntenants:\n  acme:\n")).settings.tenants.keys() == {"acme"}


def test_off_is_a_word_and_only_true_and_false_are_booleans(write) -> None:
    assert load(write("l2:\n  hugepages: off\n")).settings.l2.hugepages == "off"
    (error,) = errors_of(write("l3:\n  enabled: yes\n"))
    assert (error.key, error.line) == ("l3.enabled", 2)
    assert "true or false" in error.message


def test_runtime_dir_is_the_one_that_clients_find() -> None:
    for env in ({"HICACHE_RUNTIME_DIR": "/a"}, {"XDG_RUNTIME_DIR": "/b"}, {}):
        assert load_settings(None, (), env, BIG).settings.server.runtime_dir == runtime_dir(None, env)


# ---- strictness


def test_all_errors_are_told_at_once_with_line_and_nearest_key(write) -> None:
    path = write(
        "l2:\n  sise: 8GiB\n  copy_threads: 0\nserver:\n  log_level: inof\n  drain: 20\nl3:\n  enabled: true\n"
        "write_polcy: none\n"
    )
    found = errors_of(path, ["l2.parnt=2MiB", "nonsense"], {"HICACHE__L2__SIZE": "8XB"})
    told = {error.key: error for error in found}
    assert told["l2.sise"].line == 2
    assert "l2.size" in told["l2.sise"].remedy
    assert told["l2.copy_threads"].line == 3
    assert told["server.log_level"].line == 5
    assert "info" in told["server.log_level"].remedy
    assert told["server.drain"].line == 6
    assert "unit" in told["server.drain"].message
    assert "l3.write_policy" in told["write_polcy"].remedy
    assert told["l2.parnt"].where == "--set l2.parnt=2MiB"
    assert told["l2.size"].where == "HICACHE__L2__SIZE"
    assert told["l3.enabled"].line == 8  # a check across keys, beside the others
    assert any(error.where == "--set nonsense" for error in found)
    assert len(found) == 9
    assert [error.line for error in found if error.line] == [2, 3, 5, 6, 8, 9]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("l2: {size: 1GiB}\nl2: {size: 2GiB}\n", 2, "given twice, first on line 1"),
        ("l2:\n  size: 1GiB\n  size: 1GiB\n", 3, "given twice"),
        ("l2:\n  size: [1GiB\n", 3, "not valid YAML"),
        ("- a\n- b\n", 1, "must be a mapping"),
        ("just words\n", 1, "must be a mapping"),
        ("a: &x {b: 1}\nc: *x\n", 2, "aliases"),
        ("l2: 5\n", 1, "must be a section"),
        ("l2:\n  copy_threads: 2.5\n", 2, "whole number"),
        ("l2:\n  copy_threads: '2'\n", 2, "whole number"),
        ("l2:\n  size: 8\n", 2, "has no unit"),
        ("l2:\n  size: 100B\n", 2, "must be 1MiB to 64TiB, got 100B"),
        ("l3:\n  path: ''\n", 2, "must not be empty"),
        ("l2:\n  ? [a, b]\n  : 1\n", 2, "plain word"),
        ("---\nl2: {}\n---\nl3: {}\n", 3, "not valid YAML"),
        ("limits:\n  lease_ttl: 0.1s\n", 2, "must be 1s to 1d"),
        ("l2:\n  size: !!python/object:os.system 1\n", 2, "not valid YAML"),
    ],
)
def test_a_bad_file_names_the_line(write, text: str, line: int, message: str) -> None:
    found = errors_of(write(text))
    assert [error.line for error in found] == [line]
    assert message in found[0].message


def test_a_missing_binary_or_huge_file_is_one_error(tmp_path: Path) -> None:
    assert "cannot read" in errors_of(tmp_path / "none.yaml")[0].message
    assert "cannot read" in errors_of(tmp_path)[0].message
    (tmp_path / "b.yaml").write_bytes(b"l2:\n  size: \xff\xfe\n")
    assert (errors_of(tmp_path / "b.yaml")[0].line, errors_of(tmp_path / "b.yaml")[0].message) == (
        2,
        "not UTF-8 text",
    )
    (tmp_path / "c.yaml").write_text("#" * (1 << 20) + "\n")
    assert "at most" in errors_of(tmp_path / "c.yaml")[0].message
    (tmp_path / "d.yaml").write_text("[" * 100_000)
    assert len(errors_of(tmp_path / "d.yaml")) == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("l2.size=", "must be a size like 8GiB, got nothing"),
        ("l2.size=[1]", "must be a size like 8GiB, got [1]"),
        ("l2.size=true", "must be a size like 8GiB, got True"),
        ("l2.parent={}", "must be a size like 2MiB, or auto, got {}"),
        ("limits.lease_ttl=~", "must be a duration like 30s, got nothing"),
        ("server.runtime_dir=123", "must be text, got 123"),
        ("server=5", "must be a section of keys, got 5"),
        ("tenants=x", "must be a section of keys, got 'x'"),
        ("a.b={", "not valid YAML: expected the node content, but found '<stream end>'"),
        ("=5", "is not section.key=value"),
        ("tenants.=1", "is not section.key=value"),
    ],
)
def test_a_bad_option_names_itself(option: str, message: str) -> None:
    (error,) = errors_of(overrides=[option])
    assert (error.where, error.line) == (f"--set {option}", None)
    assert error.message == message


@pytest.mark.parametrize("name", ["HICACHE__", "HICACHE__L2__", "HICACHE____SIZE"])
def test_a_variable_that_names_no_key(name: str) -> None:
    (error,) = errors_of(env={name: "1"})
    assert (error.where, error.message) == (name, "names no key")


def test_other_variables_of_the_program_are_not_settings() -> None:
    assert load(env={"HICACHE_CONFIG": "/x", "HICACHES__L2__SIZE": "1"}).settings == load().settings


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("l2.sise", "l2.size"),
        ("L2", "l2"),
        ("limit", "limits"),
        ("copy_threads", "l2.copy_threads"),
        ("server.lease_ttl", "limits.lease_ttl"),
        ("tenants.acme.credential", "tenants.acme.credential_file"),
        ("qqqqq", None),
    ],
)
def test_nearest_key(typed: str, meant: str | None) -> None:
    assert nearest(tuple(typed.split("."))) == meant


def test_settings_do_not_change_after_loading() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().settings.l2.size = 5  # type: ignore[misc]


# ---- checks across keys and against the machine


def test_l3_needs_a_folder_and_a_folder_needs_l3(tmp_path: Path) -> None:
    (error,) = errors_of(overrides=["l3.enabled=true"])
    assert (error.key, error.remedy) == ("l3.enabled", "set l3.path")
    (warning,) = load(overrides=[f"l3.path={tmp_path}"]).warnings
    assert warning.key == "l3.path"
    ok = [f"l3.path={tmp_path}/new", "l3.enabled=true", "l3.size=16MiB", "l3.min_free=0"]
    assert load(overrides=ok).warnings == ()
    assert load(overrides=[*ok, "l3.size=1000TiB"]).warnings[0].key == "l3.size"
    (tmp_path / "file").touch()
    assert "not a folder" in errors_of(overrides=[f"l3.path={tmp_path}/file", "l3.enabled=true"])[0].message


def test_l2_must_fit_the_machine() -> None:
    host = HostFacts(memory_limit=8 << 30, memory_available=4 << 30, cores=2)
    assert load(overrides=["l2.size=4GiB"], host=host).warnings == ()
    assert load(overrides=["l2.size=5GiB"], host=host).warnings[0].key == "l2.size"
    (error,) = errors_of(overrides=["l2.size=9GiB"], host=host)
    assert "8.0 GiB" in error.message
    assert load(overrides=["l2.copy_threads=9"], host=host).warnings[0].key == "l2.copy_threads"


@pytest.mark.parametrize(
    ("override", "key", "word"),
    [
        ("l2.parent=5000B", "l2.parent", "multiple of 4KiB"),
        ("l2.parent=2GiB", "l2.parent", "more than l2.size"),
        ("limits.buffer_size=1MiB", "limits.buffer_size", "cannot hold"),
        ("server.runtime_dir=/" + "x" * 100, "server.runtime_dir", "bytes"),
        ("identity.secret_file=/nowhere/secret", "identity.secret_file", "not a readable file"),
        ("tenants.acme.credential_file=/nowhere", "tenants.acme.credential_file", "not a readable file"),
    ],
)
def test_fatal_checks(override: str, key: str, word: str) -> None:
    (error,) = errors_of(overrides=[override])
    assert error.key == key
    assert word in error.message
    assert error.remedy


def test_hugepages_must_divide_and_be_there() -> None:
    found = check(Settings.model_validate({"l2": {"size": (1 << 30) + 4096, "hugepages": "1GiB"}}), BIG)
    assert ("l2.size", True) in {(item.keys[0], item.fatal) for item in found}
    huge = Settings.model_validate({"l2": {"size": 64 << 40, "hugepages": "2MiB"}})
    assert "huge pages" in check(huge, HostFacts(1 << 50, 1 << 50, 8))[0].message


def test_short_leases_are_warned_about() -> None:
    (warning,) = load(overrides=["limits.lease_ttl=10s"]).warnings
    assert warning.key == "limits.lease_ttl"


def test_secrets_that_others_can_read_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    secret.chmod(0o644)
    (error,) = errors_of(overrides=[f"identity.secret_file={secret}"])
    assert error.remedy == f"chmod 600 {secret}"
    secret.chmod(0o600)
    assert load(overrides=[f"identity.secret_file={secret}"]).warnings == ()


@pytest.mark.parametrize("content", [b"", b" \n"])
def test_a_credential_file_must_hold_a_credential(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "credential"
    path.write_bytes(content)
    path.chmod(0o600)
    (error,) = errors_of(overrides=[f"tenants.acme.credential_file={path}"])
    assert "1 to 4096 bytes" in error.message
    assert "openssl" in error.remedy


def test_a_secret_of_another_length_is_told_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(31))
    path.chmod(0o600)
    (error,) = errors_of(overrides=[f"identity.secret_file={path}"])
    assert error.key == "identity.secret_file"
    assert error.message.startswith(f"{path} must hold exactly 32 random bytes")
    assert f"/dev/urandom > {path}" in error.remedy


def test_the_folder_of_the_sockets_must_be_ours_to_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for name, word in (("file", "not a directory"), ("file/below", "not a folder")):
        (error,) = errors_of(overrides=[f"server.runtime_dir={tmp_path}/{name}"])
        assert error.key == "server.runtime_dir"
        assert word in error.message
        assert error.remedy
    assert load(overrides=[f"server.runtime_dir={tmp_path}/new/deep"]).warnings == ()
    assert not (tmp_path / "new").exists()
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "run").stat().st_uid + 1)
    (error,) = errors_of(overrides=[f"server.runtime_dir={tmp_path}/run"])
    assert "belongs to uid" in error.message


def test_a_folder_that_may_not_be_written_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    l3 = ["l3.enabled=true", f"l3.path={tmp_path}/a/b"]
    found = errors_of(overrides=[*l3, f"server.runtime_dir={tmp_path}/run"])
    assert {error.key for error in found} == {"l3.path", "server.runtime_dir"}
    assert all(f"may not write in {tmp_path}" in error.message and error.remedy for error in found)


@pytest.mark.parametrize("kind", ["nfs4", "overlay", "fuse.sshfs"])
def test_a_disk_tier_on_a_filesystem_that_the_store_refuses(tmp_path: Path, kind: str) -> None:
    host = replace(BIG, filesystem=lambda path: kind)
    (error,) = errors_of(overrides=["l3.enabled=true", f"l3.path={tmp_path}/new"], host=host)
    assert error.key == "l3.path"
    assert f"is on {kind}" in error.message
    assert "local disk" in error.remedy
    allowed = ["l3.enabled=true", f"l3.path={tmp_path}/new", "l3.allow_unsafe_fs=true"]
    assert f"is on {kind}" in load(overrides=allowed, host=host).warnings[0].message


def test_a_disk_tier_in_memory_is_warned_about(tmp_path: Path) -> None:
    ok = [f"l3.path={tmp_path}", "l3.enabled=true", "l3.size=16MiB", "l3.min_free=0"]
    (warning,) = load(overrides=ok, host=replace(BIG, filesystem=lambda path: "tmpfs")).warnings
    assert warning.key == "l3.path"
    assert "tmpfs" in warning.message
    assert load(overrides=ok, host=replace(BIG, filesystem=lambda path: "")).warnings == ()


def test_a_lost_or_bad_secret_beside_the_disk_tier_is_told_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    l3 = ["l3.enabled=true", f"l3.path={tmp_path}"]
    assert "is gone" in errors_of(overrides=l3)[0].message
    (tmp_path / "secret").write_text("short")
    assert "must hold" in errors_of(overrides=l3)[0].message
    (tmp_path / "secret").write_text("ab" * 32 + "\n")
    (tmp_path / "secret").chmod(0o600)
    assert load(overrides=l3).settings.l3.path == tmp_path


def test_a_check_is_silent_about_keys_that_are_already_wrong() -> None:
    (error,) = errors_of(overrides=["l2.size=9XB", "l2.parent=2GiB"])
    assert error.key == "l2.size"


def test_host_facts_of_this_machine_are_plausible() -> None:
    host = read_host()
    assert 0 < host.memory_available <= host.memory_limit
    assert host.cores == len(os.sched_getaffinity(0))


# ---- reload


def test_changed_keys_are_sorted_into_hot_and_cold() -> None:
    old = load().settings
    new = load(overrides=["server.log_level=debug", "l2.size=2GiB", "tenants={a: {}}", "server.drain=1s"]).settings
    assert changed_keys(old, new) == (["server.drain", "server.log_level"], ["l2.size", "tenants.a.credential_file"])
    assert changed_keys(old, old) == ([], [])


def test_hot_keys_exist() -> None:
    assert hot_keys() <= {key.name for key in keys()}
    assert "server.log_level" in hot_keys()


# ---- the code, the files and the schema say the same


def test_every_limit_is_set_from_the_settings_or_fixed_on_purpose() -> None:
    fixed = {"buffers", "groups", "layers", "fence_slots", "scope_bytes"}
    odd = {name: 7 for name in ("sessions", "requests_in_flight", "leases_per_session", "tokens_per_request")}
    odd |= {"pages_in_flight": 7, "tree_tokens": 7, "io_batch_pages": 7}
    sizes = {"body_size": 1 << 17, "buffer_size": 1 << 18, "pool_size": 1 << 21}
    times = {"lease_ttl": 77.0, "session_silence": 78.0}
    limits = Settings.model_validate({"limits": odd | sizes | times, "server": {"drain": 79.0}}).to_limits()
    default = Limits()
    unchanged = {
        field.name for field in fields(Limits) if getattr(limits, field.name) == getattr(default, field.name)
    }
    assert unchanged == fixed


def test_default_yaml_is_the_defaults(write) -> None:
    loaded = load(write(default_yaml()))
    assert loaded.settings == load().settings
    named = {key.name for key in keys() if key.default is not None}
    assert {key for key, origin in loaded.origins.items() if origin.kind == "file"} == named


def test_demo_yaml_is_valid() -> None:
    settings = load(ROOT / "configs/demo.yaml").settings
    assert settings.l3.enabled
    assert settings.l3.path == Path.cwd() / ".demo/l3"


def test_multi_tenant_yaml_lacks_nothing_but_its_secrets_and_huge_pages() -> None:
    found = errors_of(ROOT / "configs/multi-tenant.yaml")
    # Huge pages are the machine's affair; whether this user may write in /run and /var/lib is, too.
    assert {error.key for error in found} - {"l2.hugepages", "server.runtime_dir", "l3.path"} == {
        "identity.secret_file",
        "tenants.search.credential_file",
        "tenants.support.credential_file",
    }


def _match(value: object, schema: dict[str, object], root: dict[str, object]) -> bool:
    """The part of JSON schema that ours uses, so that the files are held to it without another library."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return _match(value, root["$defs"][name], root)  # type: ignore[index]
    if "anyOf" in schema:
        return any(_match(value, part, root) for part in schema["anyOf"])  # type: ignore[attr-defined]
    kind = schema.get("type")
    if kind == "object":
        props = schema.get("properties", {})
        extra = schema.get("additionalProperties", False)
        return isinstance(value, dict) and all(
            _match(item, props.get(name, extra) or {"type": "never"}, root)  # type: ignore[attr-defined]
            for name, item in value.items()
        )
    if kind == "array":
        return isinstance(value, list) and all(_match(item, schema["items"], root) for item in value)  # type: ignore[arg-type]
    if kind == "string":
        good = isinstance(value, str) and re.search(str(schema.get("pattern", "")), value) is not None
        return good and ("enum" not in schema or value in schema["enum"])  # type: ignore[operator]
    if kind == "integer":
        low, high = schema["minimum"], schema["maximum"]
        return type(value) is int and low <= value <= high  # type: ignore[operator]
    return (kind, type(value)) in {("boolean", bool), ("null", type(None))}


@pytest.mark.parametrize("name", ["default", "demo", "multi-tenant"])
def test_files_match_the_json_schema(name: str) -> None:
    data = yaml.load((ROOT / f"configs/{name}.yaml").read_text(), Loader=StrictLoader)
    schema = json_schema()
    assert _match(data, schema, schema)
    data["l2"]["sise"] = "1GiB"
    assert not _match(data, schema, schema)
    assert json.loads(json.dumps(schema)) == schema
