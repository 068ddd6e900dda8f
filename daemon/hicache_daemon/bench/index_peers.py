"""Neighbours' indexes behind the benchmark's `Subject`, where they are installed: driven, never copied.

SGLang's trees take token ids (`array('q')`) and answer with a length and a node; collecting the slot numbers along
the path comes on top and is not in their figures (ours include the rows). Dynamo's tree takes one hash per block, so
hashing comes on top and is not in its figures; its inserts are events in JSON, made beforehand.
"""

import hashlib
import importlib
import importlib.util
import json
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_daemon.bench.report import Progress

Int32s = npt.NDArray[np.int32]


class _Allocator:
    """The slot allocator that SGLang's trees ask for. Every slot is granted, freeing is forgotten."""

    device = "cpu"

    def __init__(self, page_tokens: int) -> None:
        self.page_size = page_tokens

    def free(self, slots: object) -> None:
        """Duplicates of known pages come back here."""

    def available_size(self) -> int:
        return 1 << 30

    def get_kvcache(self) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_named: None


class SGLangTree:
    """`RadixCache` or one of the two cores of `UnifiedRadixCache`."""

    def __init__(self, core: str, page_tokens: int) -> None:
        radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        self._torch: Any = importlib.import_module("torch")
        # An insert clones its slots; from 32k slots on torch would wait for its thread pool, which on a busy machine
        # of few cores costs milliseconds and says nothing about the tree.
        self._torch.set_num_threads(1)
        self._key, self._insert, self._match = radix.RadixKey, base.InsertParams, base.MatchPrefixParams
        self._slots = 0
        allocator = _Allocator(page_tokens)
        if core == "radix":
            self._tree: Any = radix.RadixCache.create_simulated(page_size=page_tokens, mock_allocator=allocator)
            return
        init = importlib.import_module("sglang.srt.mem_cache.cache_init_params")
        unified = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")
        component = importlib.import_module("sglang.srt.mem_cache.unified_cache.component_type")
        params = init.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=page_tokens,
            tree_components=(component.ComponentType.FULL,),
            tree_core_backend=core,
        )
        self._tree = unified.UnifiedRadixCache(params)

    def prepare(self, tokens: Int32s) -> tuple[Any, Any]:
        slots = self._torch.arange(self._slots, self._slots + tokens.size, dtype=self._torch.int64)
        self._slots += tokens.size
        return array("q", tokens.tolist()), slots

    def insert(self, item: tuple[Any, Any], /) -> object:
        return self._tree.insert(self._insert(key=self._key(item[0]), value=item[1]))

    def match(self, item: tuple[Any, Any], /) -> Any:
        return self._tree.match_prefix(self._match(key=self._key(item[0])))

    def matched_tokens(self, item: tuple[Any, Any]) -> int:
        return int(self.match(item).device_prefix_len)


class DynamoTree:
    """`dynamo.llm.RadixTree`, one worker."""

    def __init__(self, page_tokens: int) -> None:
        self._tree: Any = importlib.import_module("dynamo.llm").RadixTree()
        self._page_tokens = page_tokens
        self._events = 0

    def prepare(self, tokens: Int32s) -> tuple[list[int], bytes]:
        size, chain, hashes = self._page_tokens, hashlib.blake2b(digest_size=8), []
        for start in range(0, tokens.size - size + 1, size):
            chain.update(tokens[start : start + size].tobytes())
            hashes.append(int.from_bytes(chain.digest(), "little") >> 1)
        blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
        self._events += 1
        event = {
            "event_id": self._events,
            "dp_rank": 0,
            "data": {"stored": {"parent_hash": None, "blocks": blocks}},
        }
        return hashes, json.dumps(event).encode()

    def insert(self, item: tuple[list[int], bytes], /) -> object:
        return self._tree.apply_event(0, item[1])

    def match(self, item: tuple[list[int], bytes], /) -> Any:
        return self._tree.find_matches(item[0])

    def matched_tokens(self, item: tuple[list[int], bytes]) -> int:
        return int(max(self.match(item).scores.values(), default=0)) * self._page_tokens


Maker = Callable[[], "SGLangTree | DynamoTree"]


def _makers(page_tokens: int) -> Iterator[tuple[str, str, Maker]]:
    """Package to look for, prefix of its cases, how to make the index."""
    yield "sglang", "sglang_radix", lambda: SGLangTree("radix", page_tokens)
    yield "sglang", "sglang_unified_rust", lambda: SGLangTree("rust", page_tokens)
    yield "sglang", "sglang_unified_python", lambda: SGLangTree("python", page_tokens)
    yield "dynamo", "dynamo", lambda: DynamoTree(page_tokens)


def installed(page_tokens: int, progress: Progress) -> Iterator[tuple[str, Maker]]:
    """Neighbours that can be imported here, with how to make an empty index of each."""
    for package, name, make in _makers(page_tokens):
        if importlib.util.find_spec(package) is None:
            continue
        try:
            make()
        except (ImportError, AttributeError, TypeError) as error:  # another release, or parts of it are missing
            progress(f"{name}: installed, but cannot be driven here ({error})")
            continue
        yield name, make
