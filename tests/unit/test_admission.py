"""Who may come in: tenants, versions, specs."""

from pathlib import Path

import msgspec
import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.messages import Attach, Hello
from hicache.protocol.version import VERSION
from hicache_daemon.admission import Tenants, check_hello
from tests.daemon_harness import layout, model

LIMITS = Limits()
OPEN = Tenants({})
ATTACH = Attach(b"i" * 16, 1, layout().pool_bytes, 4)
HELLO = Hello((VERSION,), b"i" * 16, 1, model(), layout())


def test_a_proper_hello_agrees_on_a_version() -> None:
    assert check_hello(HELLO, ATTACH, OPEN, LIMITS) == VERSION


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"versions": ()}, ErrorCode.VERSION),
        ({"versions": (1 << 8,)}, ErrorCode.VERSION),
        ({"tenant": ""}, ErrorCode.BAD_SPEC),
        ({"tenant": "t" * 257}, ErrorCode.BAD_SPEC),
        ({"engine": "e" * 257}, ErrorCode.BAD_SPEC),
        ({"model": msgspec.structs.replace(model(), name="")}, ErrorCode.BAD_SPEC),
        ({"layout": layout(65)}, ErrorCode.BAD_SPEC),
    ],
)
def test_what_does_not_fit_is_refused_with_its_code(changes: dict[str, object], code: ErrorCode) -> None:
    with pytest.raises(HiCacheError) as caught:
        check_hello(msgspec.structs.replace(HELLO, **changes), ATTACH, OPEN, LIMITS)
    assert caught.value.code is code


def test_without_tenants_any_name_will_do() -> None:
    OPEN.check("anyone", "anything")


@pytest.mark.parametrize(
    ("tenant", "credential", "let_in"),
    [
        ("alice", "sesame", True),
        ("alice", "Sesame", False),
        ("alice", "", False),
        ("public", "", True),
        ("public", "whatever", True),
        ("mallory", "sesame", False),
        ("mallory", "\0 matches nothing that a client can send \0", False),
        ("default", "", False),
    ],
)
def test_a_tenant_needs_its_own_credential(tenant: str, credential: str, let_in: bool) -> None:
    tenants = Tenants({"alice": b"sesame", "public": None})
    if let_in:
        tenants.check(tenant, credential)
        return
    with pytest.raises(HiCacheError) as caught:
        tenants.check(tenant, credential)
    assert caught.value.code is ErrorCode.DENIED
    assert "sesame" not in str(caught.value)


def test_credential_files_are_read_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"  sesame\n")
    Tenants.from_files({"alice": tmp_path / "good"}).check("alice", "sesame")
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "large").write_bytes(b"x" * 5000)
    for name in ("empty", "large", "absent"):
        with pytest.raises(HiCacheError, match=r"tenants\.alice\.credential_file"):
            Tenants.from_files({"alice": tmp_path / name})
