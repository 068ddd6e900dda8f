"""May this client come in? Everything that can be said before its memory is touched."""

import hmac
from collections.abc import Mapping
from pathlib import Path

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.messages import Attach, Hello
from hicache.protocol.version import choose
from hicache.spec.layout import check_layout

CREDENTIAL_BYTES = 4096
TEXT_CHARS = 256
GROUP_BYTES = 16


def read_credential(tenant: str, path: Path) -> bytes:
    """The credential in a tenant's file, without the white space around it. Raises `HiCacheError(CONFIG)`."""
    key = f"tenants.{tenant}.credential_file"
    try:
        credential = path.read_bytes().strip()
    except OSError as error:
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"{key}: cannot read {path}: {error.strerror}",
            "make it a file that the daemon's user may read, mode 0600",
        ) from error
    if not 0 < len(credential) <= CREDENTIAL_BYTES:
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"{key}: {path} must hold 1 to {CREDENTIAL_BYTES} bytes, it has {len(credential)}",
            f"make one with: (umask 077; openssl rand -hex 32 > {path})",
        )
    return credential


class Tenants:
    """Names and credentials. Empty: any name, no credential."""

    def __init__(self, credentials: Mapping[str, bytes | None]) -> None:
        """`credentials`: tenant to its secret, or None if the name alone is enough."""
        self._credentials = dict(credentials)

    @classmethod
    def from_files(cls, files: Mapping[str, Path | None]) -> "Tenants":
        """Read the credential files. Raises `HiCacheError(CONFIG)`."""
        return cls({name: None if path is None else read_credential(name, path) for name, path in files.items()})

    def check(self, tenant: str, credential: str) -> None:
        """Raise `HiCacheError(DENIED)` unless the credential opens this tenant.

        Unknown tenant and wrong credential read the same and take the same time, so names cannot be probed."""
        if not self._credentials:
            return
        expected = self._credentials.get(tenant, b"\0 matches nothing that a client can send \0")
        given = credential.encode()
        if expected is None or (hmac.compare_digest(expected, given) and tenant in self._credentials):
            return
        raise HiCacheError(
            ErrorCode.DENIED,
            "this tenant is not known here, or the credential is not its own",
            "check the client's tenant and credential against the daemon's `tenants` section",
        )


def check_hello(hello: Hello, attach: Attach, tenants: Tenants, limits: Limits) -> int:
    """The protocol version to speak. Raises `HiCacheError` with what does not fit and what to do."""
    version = choose(hello.versions)
    if len(hello.group) not in (0, GROUP_BYTES):
        text = f"Hello: group must have 0 or {GROUP_BYTES} bytes, got {len(hello.group)}"
        raise HiCacheError(ErrorCode.BAD_SPEC, text, "draw 16 random bytes per engine")
    for name, text in (("tenant", hello.tenant), ("engine", hello.engine)):
        if len(text) > TEXT_CHARS or (name == "tenant" and not text):
            raise HiCacheError(ErrorCode.BAD_SPEC, f"Hello: {name} must have 1 to {TEXT_CHARS} characters")
    tenants.check(hello.tenant, hello.credential)
    hello.model.check(limits.groups, limits.layers)
    hello.shard.check()
    check_layout(hello.model, hello.layout, limits.pool_bytes)
    if attach.pool_bytes and hello.layout.pool_bytes > attach.pool_bytes:
        raise HiCacheError(
            ErrorCode.BAD_SPEC,
            f"layout: pool_bytes {hello.layout.pool_bytes} is more than the {attach.pool_bytes} that were attached",
            "attach the whole pool, or describe only what is attached",
        )
    return version
