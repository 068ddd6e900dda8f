"""These tests run in the engines' environment: `make test-engines`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from tests.daemon_harness import DaemonProcess  # noqa: E402


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon with 256 MiB of L2 and no disk."""
    with DaemonProcess(tmp_path, ["l2.size=256MiB"]) as process:
        yield process
