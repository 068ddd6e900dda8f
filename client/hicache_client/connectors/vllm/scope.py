"""A vLLM request as the daemon's `Scope`: what else, besides its tokens, decides what its KV is.

    cache_salt ──────────────► salt
    lora_request ────────────► digest of the adapter's files
    mm_features ─────────────► (position, digest of the identifier), in order
    prompt embeddings, … ────► Uncacheable: neither looked up nor stored

A digest of an adapter is read on a thread of its own, as adapters are large. It is read once for each
(id, name, path), as vLLM reads the weights once: if the files change afterwards nobody knows which of them vLLM
holds, so that adapter is not cached any more. Never `hash()`: it differs between processes.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache.base.limits import Limits
from hicache.protocol.messages import Scope

CHUNK_BYTES = 1 << 20
ADAPTERS_REMEMBERED = 1024
MULTIMODAL_BYTES = 48  # of one entry on the wire, at most
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt"}
CONFIG_NAME = "adapter_config.json"

_log = logging.getLogger("hicache.vllm")

_Stamp = tuple[tuple[str, int, int], ...]  # name, mtime in ns and size of each file


@dataclass(frozen=True, slots=True)
class Uncacheable:
    """Why a request's KV is not shared."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotYet:
    """Ask again: an adapter is being read."""


Scoped = Scope | Uncacheable | NotYet


@dataclass(slots=True)
class _Adapter:
    """One adapter's digest, or why it has none. `digest` is written by the reading thread."""

    stamp: _Stamp
    digest: str = ""
    refused: str = ""
    done: threading.Event = field(default_factory=threading.Event)


class Adapters:
    """Digests of LoRA adapters, by (id, name, path)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], _Adapter] = {}

    def digest(self, lora: Any) -> str | Uncacheable | NotYet:
        """The digest of what the adapter's files say, in hex. Never waits for the disk longer than a `stat` takes."""
        if getattr(lora, "load_inplace", False):
            return Uncacheable(f"LoRA adapter {lora.lora_name!r} is loaded in place, so its weights may change")
        key = (int(lora.lora_int_id), str(lora.lora_name), str(lora.lora_path))
        try:
            files = adapter_files(key[2])
            stamp = _stamp_of(files)
        except OSError as error:
            return Uncacheable(
                f"LoRA adapter {lora.lora_name!r}: expected a local folder with its weights, {error}: "
                "give the adapter's path instead of a hub name"
            )
        adapter = self._known.get(key)
        if adapter is None:
            adapter = self._read(key, files, stamp, bool(getattr(lora, "is_3d_lora_weight", False)))
        if adapter.stamp != stamp:
            return Uncacheable(f"LoRA adapter {lora.lora_name!r}: its files changed since it was first used")
        if not adapter.done.is_set():
            return NotYet()
        return Uncacheable(adapter.refused) if adapter.refused else adapter.digest

    def _read(self, key: tuple[int, str, str], files: list[Path], stamp: _Stamp, fused: bool) -> _Adapter:
        adapter = _Adapter(stamp)
        while len(self._known) >= ADAPTERS_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[key] = adapter

        def read() -> None:
            try:
                adapter.digest = digest_of(files, fused)
                if _stamp_of(files) != stamp:
                    adapter.refused = f"LoRA adapter {key[1]!r}: its files changed while they were read"
            except OSError as error:
                adapter.refused = f"LoRA adapter {key[1]!r} can't be read: {error}"
            finally:
                adapter.done.set()

        threading.Thread(target=read, name="hicache-adapter", daemon=True).start()
        return adapter


def adapter_files(path: str) -> list[Path]:
    """The files of an adapter that decide what it computes, sorted by name. Raises `OSError` if it has none."""
    folder = Path(path).expanduser()
    files = [each for each in sorted(folder.iterdir()) if each.suffix in WEIGHT_SUFFIXES or each.name == CONFIG_NAME]
    if not any(each.suffix in WEIGHT_SUFFIXES for each in files):
        raise FileNotFoundError(f"no {', '.join(sorted(WEIGHT_SUFFIXES))} file in {folder}")
    return files


def _stamp_of(files: list[Path]) -> _Stamp:
    found = [(each.name, os.stat(each)) for each in files]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in found)


def digest_of(files: list[Path], fused: bool) -> str:
    """BLAKE2b-256 over names, sizes and contents, in hex. Raises `OSError`."""
    whole = hashlib.blake2b(digest_size=32, person=b"hicache-lora")
    whole.update(b"fused" if fused else b"split")
    for each in files:
        content = hashlib.blake2b(digest_size=32)
        with each.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                content.update(chunk)
        name = each.name.encode()
        whole.update(len(name).to_bytes(4, "little") + name + content.digest())
    return whole.hexdigest()


class Scopes:
    """What is asked for each request. Belongs to the scheduler's thread."""

    def __init__(self, nonce: Callable[[], bytes] = lambda: os.urandom(16)) -> None:
        self._adapters = Adapters()
        self._nonce = nonce
        self._epoch = ""

    def reset(self) -> None:
        """From now on nothing that was stored before is found by this engine: the daemon can't delete for one
        engine alone, so the salt of everything that follows begins with a random nonce that only we know."""
        self._epoch = f"\0{self._nonce().hex()}\0"

    def of(self, request: Any) -> Scoped:
        """The scope of a request (vLLM's v1 Request), or why it has none."""
        reason = _refused(request)
        if reason:
            return Uncacheable(reason)
        lora = ""
        if getattr(request, "lora_request", None) is not None:
            digest = self._adapters.digest(request.lora_request)
            if not isinstance(digest, str):
                return digest
            lora = digest
        salt = self._epoch + (request.cache_salt or "")
        try:
            salt_bytes = len(salt.encode())
        except UnicodeEncodeError:
            return Uncacheable("its cache_salt is no proper text")
        multimodal = tuple(
            (int(feature.mm_position.offset), identifier_digest(str(feature.modality), feature.identifier))
            for feature in sorted(request.mm_features or (), key=lambda each: int(each.mm_position.offset))
        )
        if salt_bytes + MULTIMODAL_BYTES * len(multimodal) > Limits().scope_bytes // 2:
            return Uncacheable("its cache_salt and multimodal inputs together are too long")
        return Scope(salt=salt, lora=lora, multimodal=multimodal)


def identifier_digest(modality: str, identifier: str) -> bytes:
    """All of vLLM's identifier of a multimodal input (its content's hash, or what the caller gave for one)."""
    text = f"{modality}\0{identifier}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=32, person=b"hicache-mm").digest()


def _refused(request: Any) -> str:
    if getattr(request, "prompt_embeds", None) is not None:
        return "it has prompt embeddings, which are no tokens"
    if request.prompt_token_ids is None:
        return "it has no prompt tokens"
    if getattr(request, "prompt_is_token_ids", None) is not None:
        return "its prompt mixes tokens and embeddings"
    if getattr(request, "resumable", False):
        return "it is a streaming-input session, whose tokens may be taken back"
    if any(not feature.identifier for feature in request.mm_features or ()):
        return "a multimodal input has no identifier"
    return ""
