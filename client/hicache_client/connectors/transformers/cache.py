"""The `Cache` objects that a caller hands to `model.generate`."""

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from .batch import Batch, Row, RowStats
from .pool import Tokens


def rows_of(sequences: torch.Tensor, pads: Sequence[int]) -> list[Tokens]:
    """Rows of a left-padded [rows, columns] tensor without their padding, as int32 arrays."""
    array = sequences.detach().to("cpu", torch.int32).numpy()
    return [array[i, pad:] for i, pad in enumerate(pads)]


class HiCache(Cache):  # type: ignore[misc]
    """A cache whose prefix is served by L1 or by the daemon, layer by layer as the model reaches it.

    Give it to one `model.generate(input_ids, past_key_values=cache)` with the `input_ids` it was made for,
    then call `finish(output)` so that the generated tokens are kept too; leaving the `with` block or dropping
    the cache keeps the prompt only. After that it shows nothing, and using it raises `RuntimeError`.
    """

    def __init__(self, batch: Batch, stop_tokens: frozenset[int]) -> None:
        super().__init__(layers=batch.layers)
        self._batch = batch
        self._stop_tokens = stop_tokens
        self._finalizer = weakref.finalize(self, batch.finish)
        self._finalizer.atexit = False  # at exit the pool goes with the process

    @property
    def stats(self) -> tuple[RowStats, ...]:
        """Per row where its tokens came from; final once the prompt was computed."""
        return tuple(self._batch.stats(row) for row in self._batch.rows)

    def finish(self, sequences: torch.Tensor | None = None) -> None:
        """End of the request. `sequences` is what `generate` returned, [rows, width + new tokens]."""
        self._finalizer.detach()
        if sequences is None:
            self._batch.finish()
        else:
            pads = [row.pad for row in self._batch.rows]
            self._batch.finish(rows_of(sequences, pads), self._stop_tokens)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As of `Cache`. Raises `ValueError` for a first forward that brings tokens which the cache holds:
        assisted decoding passes the whole prompt beside a filled cache, and its output would be wrong."""
        self._batch.check_input(query_length)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def __enter__(self) -> "HiCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicCache:
        """An ordinary cache with copies of the tensors: the columns have one owner."""
        copy = DynamicCache()
        for index, layer in enumerate(self.layers):
            layer.check_open()
            self._batch.ready(index)
            copy.update(layer.keys.clone(), layer.values.clone(), index)
        return copy


class UncachedCache(DynamicCache):  # type: ignore[misc]
    """What a request gets that hicache can't serve: an ordinary cache with the same few methods."""

    def __init__(self, config: Any, rows: Sequence[Row], forgetful: bool = False) -> None:
        """`forgetful`: the call is expected to pass the whole sequence for every token (use_cache=False)."""
        super().__init__(config=config)
        self._config = config
        self._forgetful = forgetful
        self._lengths = tuple(len(row.prompt) for row in rows)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As of `Cache`. A forgetful cache starts anew when a forward brings all that it holds and one token
        more; should the call use the cache nevertheless, its forwards bring that one token only."""
        length = self.get_seq_length(layer_idx)
        if self._forgetful and length and query_length == length + 1:
            self.layers = DynamicCache(config=self._config).layers
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    @property
    def stats(self) -> tuple[RowStats, ...]:
        """Everything is recomputed."""
        return tuple(RowStats(n, 0, 0, 0, n) for n in self._lengths)

    def finish(self, sequences: torch.Tensor | None = None) -> None:
        """Nothing is kept."""

    def __enter__(self) -> "UncachedCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
