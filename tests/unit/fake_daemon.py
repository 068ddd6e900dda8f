"""A daemon in this process, for connector tests: pages in a dict, copied by the layout's own formula.

Faults are set per daemon: a load is refused, fails at a layer, comes late, or brings other bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache.protocol.messages import Match, Scope
from hicache.spec.layout import GroupLayout, L1Layout
from hicache.spec.model import ModelSpec

Bytes = npt.NDArray[np.uint8]


def runs(layout: GroupLayout, layer: int, start: int) -> Iterator[int]:
    """Byte offsets of the runs of one block×layer, in L2's order."""
    base = layout.layer_offsets[layer] + start * layout.block_stride
    offsets = [base]
    for axis in layout.axes:
        offsets = [o + i * axis.stride for o in offsets for i in range(axis.count)]
    yield from offsets


@dataclass
class Faults:
    refuse_loads: bool = False
    fail_at_layer: int | None = None
    late_at_layer: int | None = None
    corrupt: bool = False
    refuse_stores: bool = False
    absent: bool = False


@dataclass
class FakeDaemon:
    """`pages[namespace][prefix tokens]` is one page's bytes, all layers."""

    pages: dict[bytes, dict[bytes, Bytes]] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    in_l3: bool = False  # matches say L3
    lookups: int = 0
    loaded_pages: int = 0
    stored_pages: int = 0
    waits: list[int] = field(default_factory=list)
    leases: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    def open(self, spec: ModelSpec, layout: L1Layout) -> tuple["FakePort", bytearray]:
        """What the connector's `open_port` wants."""
        buffer = bytearray(layout.pool_bytes)
        return FakePort(self, spec, layout, buffer), buffer


@dataclass
class FakeHandle:
    daemon: FakeDaemon
    finished: bool = True
    failed_from: int | None = None

    def wait(self, timeout_s: float) -> bool:
        return self.finished and self.failed_from is None

    def wait_visible(self, timeout_s: float) -> bool:
        return True

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        self.daemon.waits.append(layer)
        return self.failed_from is None or layer < self.failed_from


class FakePort:
    """`Port` over the dict; loads and stores copy at once."""

    def __init__(self, daemon: FakeDaemon, spec: ModelSpec, layout: L1Layout, buffer: bytearray) -> None:
        self.daemon, self.spec, self.layout = daemon, spec, layout.groups[0]
        self.memory = np.frombuffer(buffer, np.uint8)
        self.page_bytes = spec.prefix_granularity * 4
        self.closed = False
        self.root = spec.fingerprint() + layout.fingerprint()

    @property
    def connected(self) -> bool:
        return not self.daemon.faults.absent

    def _pages(self, scope: Scope) -> dict[bytes, Bytes]:
        return self.daemon.pages.setdefault(self.root + repr(scope).encode(), {})

    def lookup(self, tokens: bytes, limit_tokens: int, scope: Scope) -> Match | None:
        if self.daemon.faults.absent:
            return None
        self.daemon.lookups += 1
        pages, end = self._pages(scope), 0
        while end + self.page_bytes <= min(len(tokens), limit_tokens * 4):
            if tokens[: end + self.page_bytes] not in pages:
                break
            end += self.page_bytes
        lease = len(self.daemon.leases) + 1 if end else 0
        if lease:
            self.daemon.leases[lease] = (self.root + repr(scope).encode(), tokens)
        n = end // 4
        return Match(lease, n, n, 0 if self.daemon.in_l3 else n, n if self.daemon.in_l3 else 0)

    def load(self, lease: int, first_page: int, starts: Sequence[int]) -> FakeHandle | None:
        faults = self.daemon.faults
        if faults.refuse_loads:
            return None
        namespace, tokens = self.daemon.leases[lease]
        stop = next((k for k in (faults.fail_at_layer, faults.late_at_layer) if k is not None), None)
        for i, start in enumerate(starts):
            end = (first_page + i + 1) * self.page_bytes
            page = self.daemon.pages[namespace][tokens[:end]]
            self._copy(page, start, stop, to_l1=True)
        self.daemon.loaded_pages += len(starts)
        return FakeHandle(self.daemon, finished=faults.late_at_layer is None, failed_from=stop)

    def store(self, tokens: bytes, first_page: int, starts: Sequence[int], scope: Scope) -> FakeHandle | None:
        if self.daemon.faults.refuse_stores or self.daemon.faults.absent:
            return None
        assert len(tokens) == (first_page + len(starts)) * self.page_bytes
        for i, start in enumerate(starts):
            key = tokens[: (first_page + i + 1) * self.page_bytes]
            if key not in self._pages(scope):
                page = np.empty(self.spec.groups[0].block_bytes(), np.uint8)
                self._copy(page, start, None, to_l1=False)
                self._pages(scope)[key] = page
                self.daemon.stored_pages += 1
        return FakeHandle(self.daemon)

    def _copy(self, page: Bytes, start: int, stop_layer: int | None, *, to_l1: bool) -> None:
        assert 0 <= start < self.layout.blocks
        run, at = self.layout.run_bytes, 0
        for layer in range(len(self.layout.layer_offsets)):
            for offset in runs(self.layout, layer, start):
                if to_l1:
                    broken = self.daemon.faults.corrupt or (stop_layer is not None and layer >= stop_layer)
                    self.memory[offset : offset + run] = page[at : at + run] ^ (0x3F if broken else 0)
                else:
                    page[at : at + run] = self.memory[offset : offset + run]
                at += run

    def release(self, lease: int) -> None:
        self.daemon.leases.pop(lease, None)

    def close(self) -> None:
        self.closed = True
