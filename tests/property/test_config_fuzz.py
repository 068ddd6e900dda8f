"""Whatever an operator types, the loader answers with settings or with `ConfigErrors`, never with anything else."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_daemon.config.catalog import keys
from hicache_daemon.config.checks import HostFacts
from hicache_daemon.config.settings import ConfigErrors, load_settings

BIG = HostFacts(memory_limit=1 << 46, memory_available=1 << 46, cores=64)
ENV = {"HICACHE_RUNTIME_DIR": "/run/hicache"}
NAMES = [key.name.replace("<name>", "acme") for key in keys()]
VALUES = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["8GiB", "8", "-1", "0", "true", "off", "null", "[]", "{}", "{a: {b: 1}}", "30s", "1e400s", ".inf", "!!int x"]
    ),
)
PIECES = st.sampled_from(
    [
        "l2",
        "size",
        "tenants",
        ":",
        " ",
        "\n",
        "  ",
        "- ",
        "8GiB",
        "{",
        "}",
        "[",
        "&a",
        "*a",
        "!x",
        "'",
        "#",
        "|",
        "\t",
        "?",
    ]
)


def answer(path: Path | None, options: list[str], env: dict[str, str]) -> None:
    try:
        sound = load_settings(path, options, ENV | env, BIG).settings.l2.size >= 1 << 20
    except ConfigErrors as caught:
        sound = bool(caught.errors) and all(error.message for error in caught.errors) and len(str(caught)) < 20_000
    assert sound


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*NAMES, "l2", "l3", "tenants", "", "l2..size", "x.y"]), VALUES), max_size=4)
)
def test_options(pairs: list[tuple[str, str]]) -> None:
    answer(None, [f"{name}={value}" for name, value in pairs], {})


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
def test_variables(pairs: dict[str, str]) -> None:
    answer(None, [], {"HICACHE__" + name.upper().replace(".", "__"): value for name, value in pairs.items()})


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=14).map("".join), st.binary(max_size=40)))
def test_files(content: str | bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        file.write(data)
        file.flush()
        answer(Path(file.name), [], {})
