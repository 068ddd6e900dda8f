"""One layer of the cache: a strided view of the L1 pool that waits for its fence before it is used.

POOLED -update-> POOLED                 keys and values are views; new columns are written in place
   \\-beam search, other batch size or dtype, no columns left, late load-> PRIVATE   ordinary growing tensors
POOLED, PRIVATE -close-> CLOSED         shows nothing, and raises when it is to be used again
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hicache.spec.model import ModelSpec

from .pool import Range


class PoolTensors:
    """The L1 pool as one tensor [layers, 2, heads, columns, dim] over shared memory, without a copy."""

    def __init__(self, buffer: Any, spec: ModelSpec, columns: int) -> None:
        group = spec.groups[0]
        self.dtype: torch.dtype = getattr(torch, group.dtype)
        shape = (len(group.layers), 2, group.kv_heads, columns, group.head_dim)
        count = 1
        for extent in shape:
            count *= extent
        self.all = torch.frombuffer(buffer, dtype=self.dtype, count=count).view(shape)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` columns of all layers from column `source` to `target`; the ranges do not overlap."""
        with torch.no_grad():
            self.all[:, :, :, target : target + count] = self.all[:, :, :, source : source + count]

    def zero(self, start: int, count: int) -> None:
        """Clear padding columns: masked values are multiplied by 0, and 0·NaN would be NaN."""
        with torch.no_grad():
            self.all[:, :, :, start : start + count] = 0

    def fill(self, column: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write [heads, n, dim] keys and values of one layer at `column`."""
        with torch.no_grad():
            self.all[layer, 0, :, column : column + keys.shape[-2]] = keys
            self.all[layer, 1, :, column : column + values.shape[-2]] = values


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a batch lies: row r begins at column start + r·stride and may hold `capacity` columns."""

    start: int
    rows: int
    stride: int
    capacity: int

    @staticmethod
    def of(held: Range, rows: int) -> "Frame":
        return Frame(held.start, rows, held.size // rows, held.size // rows)


class PoolLayer(DynamicLayer):  # type: ignore[misc]
    """Cache layer over pool columns.

    `before_write(layer, first column)` returns once this layer's loaded columns may be read and the given
    ones overwritten; it may turn the layer private. `after_write(layer)` follows each update.
    """

    def __init__(
        self,
        index: int,
        tensors: PoolTensors,
        frame: Frame,
        *,
        before_write: Callable[[int, int], None],
        after_write: Callable[[int], None],
    ) -> None:
        super().__init__()
        self.index = index
        self.pooled = True
        self.closed = False
        self._frame = frame
        self._pool_keys = tensors.all[index, 0]
        self._pool_values = tensors.all[index, 1]
        self._before_write = before_write
        self._after_write = after_write
        self.dtype, self.device = tensors.dtype, torch.device("cpu")
        self.is_initialized = True
        self.resize(0)

    def _view(self, pool: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Columns begin … end-1 of each row: [rows, heads, end-begin, dim] over the pool's memory."""
        heads, columns, dim = pool.shape
        size = (self._frame.rows, heads, end - begin, dim)
        strides = (self._frame.stride * dim, columns * dim, dim, 1)
        offset = pool.storage_offset() + (self._frame.start + begin) * dim
        return pool.as_strided(size, strides, offset)

    def resize(self, length: int) -> None:
        """Let the layer show `length` columns of the pool."""
        self.keys = self._view(self._pool_keys, 0, length)
        self.values = self._view(self._pool_values, 0, length)

    def leave_pool(self) -> None:
        """Go on in tensors of this layer's own."""
        if self.pooled:
            self.pooled = False
            self.keys, self.values = self.keys.clone(), self.values.clone()

    def close(self) -> None:
        """The columns belong to others from now on: show none, and take none."""
        self.keys, self.values = self.keys[..., :0, :], self.values[..., :0, :]
        self.closed = True

    def check_open(self) -> None:
        """Raise `RuntimeError` if this layer is closed."""
        if self.closed:
            raise RuntimeError(
                "this cache is finished, and its columns may belong to another sequence. "
                "Make a new one with connector.cache(input_ids): it finds what this one kept"
            )

    def get_seq_length(self) -> int:
        """Columns shown: the resumed prefix counts before the first update."""
        return int(self.keys.shape[-2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [rows, heads, n, dim]; returns all keys and values [rows, heads, length, dim]."""
        self.check_open()
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        self._before_write(self.index, begin)
        rows = self.keys.shape[0]
        if key_states.shape[0] != rows and key_states.shape[0] % rows == 0:
            self.batch_repeat_interleave(key_states.shape[0] // rows)
        # Under autocast keys may keep the pool's dtype where values don't.
        exact = key_states.dtype == self.dtype == value_states.dtype
        if self.pooled and (end > self._frame.capacity or not exact):
            self.leave_pool()
        if not self.pooled:
            self.keys = torch.cat([self.keys, key_states.to(self.keys.dtype)], dim=-2)
            self.values = torch.cat([self.values, value_states.to(self.values.dtype)], dim=-2)
        else:
            with torch.no_grad():
                self._view(self._pool_keys, begin, end).copy_(key_states)
                self._view(self._pool_values, begin, end).copy_(value_states)
            self.resize(end)
        self._after_write(self.index)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: rows change places, so the layer leaves the pool."""
        self.check_open()
        self._before_write(self.index, self.get_seq_length())
        self.leave_pool()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.check_open()
        self._before_write(self.index, self.get_seq_length())
        self.leave_pool()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.check_open()
        self._before_write(self.index, self.get_seq_length())
        self.leave_pool()
        super().batch_select_indices(indices)

    def reset(self) -> None:
        """Forget all columns."""
        self.check_open()
        self._before_write(self.index, 0)
        self.leave_pool()
        self.keys, self.values = self.keys[..., :0, :], self.values[..., :0, :]
