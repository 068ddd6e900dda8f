"""The root of every key chain: who may share what, folded into 256 bits.

Two requests meet in the cache only if tenant, salt, model, layout, dtypes, shard, LoRA and multimodal content
agree. All of it enters one keyed BLAKE2b-256, so a namespace id can neither be guessed nor computed without
the cluster secret, and nothing that decides what a KV block means can be left out by a later call site.
"""

import hashlib
from typing import Protocol

from hicache.base.ids import DIGEST_BYTES, Fingerprint, NamespaceId
from hicache.protocol.messages import Scope
from hicache.spec.model import ModelSpec, ShardSpec

SECRET_BYTES = 32
_PERSON = b"hicache-ns-1"  # a change of the fields below needs a new number


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...


def check_secret(secret: bytes) -> None:
    """Raise `ValueError` unless `secret` has exactly 32 bytes."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"cluster secret must have {SECRET_BYTES} bytes, got {len(secret)}")


def _put(hasher: _Hasher, name: bytes, value: bytes | None) -> None:
    """Feed one field: name and value each behind their length, and a byte that tells absent from empty.

    Without the lengths ("ab", "c") and ("a", "bc") would be one namespace.
    """
    hasher.update(len(name).to_bytes(1, "little") + name)
    if value is None:
        hasher.update(b"\x00")
    else:
        hasher.update(b"\x01" + len(value).to_bytes(8, "little") + value)


def _put_int(hasher: _Hasher, name: bytes, value: int) -> None:
    _put(hasher, name, value.to_bytes(8, "little", signed=True))


def namespace_id(
    secret: bytes, tenant: str, model: ModelSpec, layout_fingerprint: Fingerprint, *, shard: ShardSpec, scope: Scope
) -> NamespaceId:
    """32-byte id of the namespace that a request reads and writes.

    `layout_fingerprint` is `L1Layout.fingerprint()`; `scope` carries salt, LoRA and multimodal content. Raises
    `ValueError` for a secret that is not 32 bytes long and `OverflowError` for a position beyond 63 bits.
    """
    check_secret(secret)
    hasher = hashlib.blake2b(key=secret, digest_size=DIGEST_BYTES, person=_PERSON)
    _put(hasher, b"tenant", tenant.encode())
    _put(hasher, b"salt", scope.salt.encode() or None)
    _put(hasher, b"model", model.fingerprint())
    _put(hasher, b"layout", layout_fingerprint)
    # Dtype and page size are part of the model's fingerprint too. They stand here by themselves because a
    # fingerprint that forgets one of them serves fp8 pages to a bf16 engine.
    _put_int(hasher, b"page_tokens", model.prefix_granularity)
    _put_int(hasher, b"groups", len(model.groups))
    for group in model.groups:
        _put(hasher, b"group", group.name.encode())
        _put(hasher, b"dtype", group.dtype.encode())
    for rank, size in (
        (shard.tp_rank, shard.tp_size),
        (shard.pp_rank, shard.pp_size),
        (shard.cp_rank, shard.cp_size),
    ):
        _put_int(hasher, b"rank", rank)
        _put_int(hasher, b"size", size)
    _put(hasher, b"lora", scope.lora.encode() or None)
    _put_int(hasher, b"multimodal", len(scope.multimodal))
    for position, digest in scope.multimodal:
        _put_int(hasher, b"position", position)
        _put(hasher, b"content", digest)
    return NamespaceId(hasher.digest())
