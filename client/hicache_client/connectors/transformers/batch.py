"""One batch from lookup to idle: where its rows lie in L1, what is loaded, what is stored.

    OPEN (looked up, columns held) -begin-> LOADING (layer by layer) -last layer's write-> STORING -finish-> IDLE

A load that fails is computed again in place, by a forward of the prefix into a private cache. A load that is
only late may still write to its columns, so those are left to it: the batch goes on in tensors of its own.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hicache.protocol.messages import Scope

from .layer import Frame, PoolLayer, PoolTensors
from .pool import ColumnPool, Idle, Range, Resident, Tokens, common_prefix
from .port import Handle, LoadHandle, Port, StoreHandle

log = logging.getLogger("hicache.transformers")

STORES_REMEMBERED = 64  # for `flush`; a client has no more requests open than about that

KeyValues = Sequence[tuple[torch.Tensor, torch.Tensor]]  # per layer [1, heads, n, dim]


@dataclass(slots=True)
class Counters:
    """What went other than planned, over the connector's life; nothing here ever reached the user."""

    loads: int = 0
    loads_failed: int = 0  # recomputed in place
    loads_late: int = 0  # recomputed in tensors of the batch's own
    stores: int = 0
    stores_failed: int = 0
    without_columns: int = 0  # requests that found no room in L1
    unsupported_masks: int = 0  # right-padded or holed attention masks, or one that is not known
    unsupported_modes: int = 0  # requests in training mode, under autocast, or without use_cache


@dataclass(slots=True)
class Context:
    """What all batches of one connector share. `prefill(tokens)` gives the KV of a prefix, from nothing."""

    page_tokens: int
    layers: int
    tensors: PoolTensors
    pool: ColumnPool
    port: Port
    prefill: Callable[[Tokens], KeyValues]
    inexact: Callable[[], bool]  # what the model computes now is not what its weights and dtype say
    unchanged: Callable[[], bool]  # the weights are those that the daemon was told of
    l1_reuse: bool = True
    load_timeout_s: float = 10.0
    counters: Counters = field(default_factory=Counters)
    stores: deque[StoreHandle] = field(default_factory=lambda: deque(maxlen=STORES_REMEMBERED))

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything stored so far is visible to lookups; False if some will not be, or not in time."""
        deadline_s = time.monotonic() + timeout_s
        stores = [self.stores.popleft() for _ in range(len(self.stores))]
        return all([s.wait_visible(max(0.0, deadline_s - time.monotonic())) for s in stores])


@dataclass(slots=True, eq=False)
class Row:
    """One prompt. `used` tokens are served from L1 or the daemon, the rest is computed."""

    prompt: Tokens
    pad: int  # padding columns before the first token
    scope: Scope
    column: int = 0  # pool column of the first token
    l1_tokens: int = 0
    l1_source: "Resident | Row | None" = None  # a row: one of this batch, computed before this one
    l2_tokens: int = 0
    l3_tokens: int = 0
    lease: int = 0
    load: LoadHandle | None = None
    used: int = 0
    offered_tokens: int = 0
    transfers: list[Handle] = field(default_factory=list)

    @property
    def available(self) -> int:
        """Tokens that need no computing; the last one always does, for its logits."""
        return min(max(self.l1_tokens, self.l2_tokens + self.l3_tokens), len(self.prompt) - 1)

    @property
    def from_l1(self) -> bool:
        return self.l1_tokens > 0 and self.l1_tokens >= self.l2_tokens + self.l3_tokens


@dataclass(frozen=True, slots=True)
class RowStats:
    """Where the tokens of one prompt came from; the four counts sum to `prompt_tokens`."""

    prompt_tokens: int
    tokens_l1: int
    tokens_l2: int
    tokens_l3: int
    recomputed: int
    ttft_ms: float | None = None


class LateLoad(Exception):
    """A load is neither done nor over; raised only where the caller starts again without it."""


class Batch:
    """Rows of one request in one held range of columns; row r begins at frame.start + r·frame.stride."""

    def __init__(self, context: Context, held: Range, rows: list[Row], width: int, frame: Frame) -> None:
        self.context, self.held, self.rows, self.width, self.frame = context, held, rows, width, frame
        for index, row in enumerate(rows):
            row.column = frame.start + index * frame.stride + row.pad
        self.layers = [
            PoolLayer(i, context.tensors, frame, before_write=self._before_write, after_write=self._after_write)
            for i in range(context.layers)
        ]
        self.prompt_stored = False
        self._loading: list[Row] = []
        self._deadline_s = 0.0
        self._finished = False

    # ---- before the forward -------------------------------------------------------------------------

    def resume_column(self) -> int:
        """The column from which the whole batch can be computed at once."""
        return max(0, min(row.pad + row.available for row in self.rows))

    def shareable(self) -> "list[tuple[Row, int] | None]":
        """Per row the earlier row of this batch that has more of its prefix than L1 and the daemon, and how much."""
        found: list[tuple[Row, int] | None] = [None] * len(self.rows)
        for index, row in enumerate(self.rows):
            best = row.available
            for earlier in self.rows[:index]:
                length = min(common_prefix(earlier.prompt, row.prompt), len(earlier.prompt) - 1, len(row.prompt) - 1)
                if length > best:
                    best, found[index] = length, (earlier, length)
        return found

    def share(self, shares: "list[tuple[Row, int] | None]") -> None:
        """Let rows take what `shareable` found, each by `take_from_sibling` when its turn has come."""
        for row, share in zip(self.rows, shares, strict=True):
            if share is not None:
                row.l1_source, row.l1_tokens = share

    def take_from_sibling(self, row: Row) -> None:
        """Copy what an earlier row has by now. Raises `LateLoad` if that row's own load is late."""
        source = row.l1_source
        if isinstance(source, Row) and row.from_l1 and row.used:
            for layer in range(self.context.layers):
                self.wait_row(source, layer)
            self.context.tensors.copy(source.column, row.column, row.used)

    def begin(self, uniform: bool) -> int:
        """Start loads and copies; returns the column that the batch resumes from (0 … width-1).

        `uniform`: one column for all rows, that of `resume_column`; else each row keeps all it can and the
        caller computes the rows one by one.
        """
        column = self.resume_column()
        for row in self.rows:
            row.used = max(0, column - row.pad) if uniform else row.available
            self._begin_row(row)
        self._deadline_s = time.monotonic() + self.context.load_timeout_s
        if uniform:
            column = self.resume_column()  # a refused load made its row shorter
            for row in self.rows:
                row.used = min(row.used, max(0, column - row.pad))
            self.show(column)
        return column

    def _begin_row(self, row: Row) -> None:
        context = self.context
        if row.pad:
            context.tensors.zero(row.column - row.pad, row.pad)
        if not row.used:
            self._release(row)
        elif row.from_l1:
            self._release(row)
            if isinstance(row.l1_source, Resident) and row.l1_source.column != row.column:
                context.tensors.copy(row.l1_source.column, row.column, row.used)
        else:
            pages = -(-row.used // context.page_tokens)
            starts = [row.column + i * context.page_tokens for i in range(pages)]
            row.load = context.port.load(row.lease, 0, starts)
            if row.load is None:
                context.counters.loads_failed += 1
                row.l2_tokens = row.l3_tokens = row.l1_tokens = row.used = 0
                self._release(row)
            else:
                context.counters.loads += 1
                self._loading.append(row)

    def show(self, column: int) -> None:
        """Let every layer hold columns 0 … column-1."""
        for layer in self.layers:
            layer.resize(column)

    def check_input(self, query_length: int) -> None:
        """Raise `ValueError` if the first forward brings more than the columns that are still missing."""
        length = self.layers[0].get_seq_length()
        if length and not self.prompt_stored and length + query_length > self.width:
            raise ValueError(
                f"the cache holds {length} of {self.width} columns, so at most {self.width - length} may be "
                f"passed, got {query_length}. Assisted decoding passes the whole prompt: use a cache of its own"
            )

    # ---- during the forward -------------------------------------------------------------------------

    def wait_row(self, row: Row, layer: int) -> None:
        """Return once `layer` of `row` is in L1, by load or by recomputation. Raises `LateLoad`."""
        if row.load is None or row.load.wait_layer(layer, self._left_s()):
            return
        if not row.load.finished:
            self.context.counters.loads_late += 1
            raise LateLoad
        self.context.counters.loads_failed += 1
        self._recompute(row, layer)

    def ready(self, layer: int) -> None:
        """Return once every row's prefix of `layer` may be read."""
        for row in tuple(self._loading):
            try:
                self.wait_row(row, layer)
            except LateLoad:
                self._leave_pool(layer)
                break

    def _before_write(self, layer: int, begin: int) -> None:
        if self.layers[layer].pooled and self.context.inexact():  # since the cache was made
            self._leave_pool(layer)
        self.ready(layer)
        if self.prompt_stored and begin < self.width and not self._settled():
            self._leave_pool(layer)

    def _after_write(self, layer: int) -> None:
        if layer != self.context.layers - 1:
            return
        self.end_loads()
        if not self.prompt_stored and self.layers[layer].get_seq_length() >= self.width:
            self.prompt_stored = True
            if self._pooled() and self.context.unchanged():
                for row in self.rows:
                    self._store(row, row.prompt)

    def end_loads(self) -> None:
        """Every layer of every row has been waited for: give the leases back."""
        for row in self._loading:
            if row.load is not None:
                row.transfers.append(row.load)
            self._release(row)
        self._loading = []

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _pooled(self) -> bool:
        return all(layer.pooled for layer in self.layers)

    def _settled(self) -> bool:
        """True once no store reads these columns any more (waits, within the load timeout)."""
        pending = [t for row in self.rows for t in row.transfers if not t.finished]
        deadline_s = time.monotonic() + self.context.load_timeout_s
        for transfer in pending:
            transfer.wait(max(0.0, deadline_s - time.monotonic()))
        return all(t.finished for t in pending)

    def _recompute(self, row: Row, layer: int) -> None:
        """Fill layers `layer` … of the row's prefix in place; its transfer has ended, nothing else writes."""
        log.warning("a load of %d tokens failed, they are computed again", row.used)
        for index, (keys, values) in enumerate(self.context.prefill(row.prompt[: row.used])):
            if index >= layer:
                self.context.tensors.fill(row.column, index, keys[0], values[0])
        self._forget_load(row)

    def _forget_load(self, row: Row) -> None:
        if row.load is not None:
            row.transfers.append(row.load)
        row.load, row.used = None, 0
        self._loading.remove(row)
        self._release(row)

    def _leave_pool(self, layer: int) -> None:
        """Go on outside of the pool: rows whose load is late are computed again, the others copied."""
        late = []
        for row in tuple(self._loading):
            if row.load is None or not row.load.wait(self._left_s()):
                late.append(row)
        for each in self.layers:
            each.leave_pool()
        for row in late:
            log.warning("a load of %d tokens is late, they are computed again", row.used)
            index = self.rows.index(row)
            for i, (keys, values) in enumerate(self.context.prefill(row.prompt[: row.used])):
                if i >= layer:
                    end = row.pad + row.used
                    self.layers[i].keys[index, :, row.pad : end] = keys[0]
                    self.layers[i].values[index, :, row.pad : end] = values[0]
            self._forget_load(row)

    # ---- stores and the end -------------------------------------------------------------------------

    def _release(self, row: Row) -> None:
        if row.lease:
            self.context.port.release(row.lease)
            row.lease = 0

    def _store(self, row: Row, tokens: Tokens) -> None:
        """Offer all full pages of `tokens`, whose KV is written.

        Known ones too: the daemon copies only what it lacks, and what it had at the lookup it may have
        evicted since.
        """
        page = self.context.page_tokens
        pages = len(tokens) // page
        if pages <= row.offered_tokens // page:
            return
        starts = [row.column + i * page for i in range(pages)]
        data = np.ascontiguousarray(tokens[: pages * page], dtype="<i4").tobytes()
        handle = self.context.port.store(data, 0, starts, row.scope)
        if handle is None:
            self.context.counters.stores_failed += 1
        else:
            self.context.counters.stores += 1
            self.context.stores.append(handle)
            row.transfers.append(handle)
            row.offered_tokens = pages * page

    def finish(self, sequences: Sequence[Tokens] | None = None, stop_tokens: frozenset[int] = frozenset()) -> None:
        """Store what was generated and leave the columns idle. Idempotent.

        `sequences`: per row its prompt and what followed (no padding before); without them only the prompt
        is known. A row counts up to its first stop token after the prompt.
        """
        if self._finished:
            return
        self._finished = True
        length = min(layer.get_seq_length() for layer in self.layers)
        residents = []
        complete = self._pooled() and not self._loading and self.prompt_stored and length >= self.width
        if complete and self.context.unchanged():
            for index, row in enumerate(self.rows):
                tokens = row.prompt if sequences is None else _until_stop(sequences[index], row, stop_tokens)
                tokens = tokens[: length - row.pad]
                self._store(row, tokens)
                residents.append(Resident(tokens, row.column, row.scope, row.offered_tokens, row.transfers))
        for layer in self.layers:
            layer.close()
        for row in self.rows:
            self._release(row)
        pending = [t for row in self.rows for t in (*row.transfers, *((row.load,) if row.load else ()))]
        if residents and self.context.l1_reuse:
            self.context.pool.park(self.held, tuple(residents))
        else:
            self.context.pool.retire(self.held, pending)

    def stats(self, row: Row, ttft_ms: float | None = None) -> RowStats:
        n, used = len(row.prompt), row.used
        l1 = used if row.from_l1 else 0
        l2 = min(used - l1, row.l2_tokens)
        return RowStats(n, l1, l2, used - l1 - l2, n - used, ttft_ms)


def _until_stop(sequence: Tokens, row: Row, stop_tokens: frozenset[int]) -> Tokens:
    generated = sequence[len(row.prompt) :]
    stops = np.flatnonzero(np.isin(generated, list(stop_tokens))) if stop_tokens else np.empty(0, np.int64)
    end = int(stops[0]) + 1 if len(stops) else len(generated)
    return sequence[: len(row.prompt) + end]


# ---- opening ----------------------------------------------------------------------------------------


def open_batch(context: Context, rows: list[Row], width: int, max_new_tokens: int) -> Batch | None:
    """Hold columns for these rows and look them up; None if L1 has no room for them."""
    capacity = width + max_new_tokens
    batch = _continue_in_place(context, rows, width, capacity)
    if batch is None:
        for row in rows:  # what is about to be copied from must not be evicted for it
            found = context.pool.best(row.prompt, row.scope) if context.l1_reuse else None
            if found:
                context.pool.touch(found[0])
        held = context.pool.allocate(len(rows) * capacity)
        if held is None:
            context.counters.without_columns += 1
            return None
        batch = Batch(context, held, rows, width, Frame.of(held, len(rows)))
        for row in rows:
            found = context.pool.best(row.prompt, row.scope) if context.l1_reuse else None
            if found:
                row.l1_source, row.l1_tokens = found[1], found[2]
    for row in rows:
        _look_up(context, row)
    return batch


def _continue_in_place(context: Context, rows: list[Row], width: int, capacity: int) -> Batch | None:
    """Go on in the columns of an idle sequence that this prompt continues or repeats."""
    if len(rows) != 1 or rows[0].pad or not context.l1_reuse:
        return None
    row = rows[0]
    found = context.pool.best(row.prompt, row.scope)
    if found is None:
        return None
    idle, resident, length = found
    if len(idle.residents) != 1 or length < min(len(resident.tokens), len(row.prompt) - 1):
        return None
    if not context.pool.extend(idle.range, resident.column - idle.range.start + capacity):
        return None
    if not _overwritable(idle, length):
        return None
    held = context.pool.claim(idle)
    frame = Frame(resident.column, 1, held.end - resident.column, held.end - resident.column)
    row.l1_source, row.l1_tokens = resident, length
    row.transfers = list(resident.transfers)
    return Batch(context, held, rows, width, frame)


def _overwritable(idle: Idle, length: int) -> bool:
    """May columns from `length`-1 on be written? Not while a store still reads them."""
    return idle.finished() or all(r.offered_tokens < length for r in idle.residents)


def _look_up(context: Context, row: Row) -> None:
    """Ask the daemon, unless L1 has every full page that could be resumed."""
    page = context.page_tokens
    n = len(row.prompt)
    if row.l1_tokens >= min(n // page * page, n - 1):  # also where no page is full
        return
    data = np.ascontiguousarray(row.prompt, dtype="<i4").tobytes()
    match = context.port.lookup(data, n, row.scope)
    if match is None:
        return
    row.lease, row.l2_tokens, row.l3_tokens = match.lease, match.l2_tokens, match.l3_tokens
