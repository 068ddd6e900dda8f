"""Which weights an engine serves: a digest of their files, so that equal weights are equal on every path."""

import hashlib
import mmap
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHUNK_BYTES = 32 << 20
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BLOB = re.compile(r"[0-9a-f]{64}")  # a hub's cache names large files by their SHA-256


class UnknownWeights(ValueError):
    """The weights have no files to tell them by; the message says what to set."""


def weights_revision(model_config: Any, load_config: Any) -> str:
    """ "files:<BLAKE2b of every weight file>" of a model on disk, "hub:<commit>" of one that vLLM fetched by itself.

    Reads every byte, on all cores (about 1 GB/s each; vLLM has just read them, so mostly from memory); files of a
    hub's cache are known by their names and are not read. Raises `UnknownWeights`."""
    form = str(getattr(load_config, "load_format", "auto")).rpartition(".")[2].lower()
    if form == "dummy":
        raise UnknownWeights("load_format dummy has no weights to tell apart: set the option 'revision'")
    path = Path(str(getattr(model_config, "model_weights", "") or model_config.model))
    if path.is_file():
        return f"files:{files_digest([path])}"
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES and each.is_file())
        if files:
            return f"files:{files_digest(files)}"
        raise UnknownWeights(f"{path} holds no file of {', '.join(SUFFIXES)}: set the option 'revision'")
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if commit:
        return f"hub:{model_config.model}@{commit}"
    raise UnknownWeights(f"the weights of {model_config.model!r} are not on disk: set the option 'revision'")


def files_digest(files: list[Path]) -> str:
    """BLAKE2b-256 over name, size and content of each file; the folder does not count."""
    total = hashlib.blake2b(digest_size=32, person=b"hicache-weights")
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        for path in files:
            size = path.stat().st_size
            total.update(f"{path.name}\0{size}\0".encode())
            blob = path.resolve().name
            if path.is_symlink() and _BLOB.fullmatch(blob):
                total.update(blob.encode())
                continue
            with path.open("rb") as file:
                if size:
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                        starts = range(0, size, CHUNK_BYTES)
                        for digest in threads.map(lambda at, content=content: _chunk(content, at), starts):
                            total.update(digest)
    return total.hexdigest()


def _chunk(content: mmap.mmap, start: int) -> bytes:
    with memoryview(content) as view:
        return hashlib.blake2b(view[start : start + CHUNK_BYTES], digest_size=32).digest()
