"""What travels between the connector's two sides: plans to the workers with each step, reports back with its output.

    scheduler ──StepPlan──► every worker ──WorkerReport──► (summed over workers) ──► scheduler
    worker ──WorkerShard──► scheduler, once, at start

Plans name L1 by *starts*: engine block b of `starts_per_block` pages of P tokens has the starts
b·starts_per_block … b·starts_per_block + starts_per_block - 1 (see spec.py). All of it pickles: workers are other
processes. No class here does anything; scheduler.py and worker.py do.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hicache.protocol.messages import Scope
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client.leases import LeaseRef

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Pages of one request that come from the daemon.

    `leases` has one lease per shard, in the order of `StepPlan.shards`. None at all: the load was promised to vLLM
    and can't be kept; it fails at once. `starts` is one int32 column per cache group: where page `first_page + i`
    goes. `blocks` are the engine's blocks, per group, that the pages touch: the ones to report if the load fails.
    `tokens`: how many vLLM was told it need not compute. `sync`: this step's forward reads the blocks.
    """

    load: int
    request: str
    leases: tuple[LeaseRef, ...]
    first_page: int
    starts: tuple[Int32s, ...]
    blocks: tuple[tuple[int, ...], ...]
    tokens: int
    sync: bool


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Pages of one request that this step's forward completes (or completed earlier).

    `tokens`: little-endian int32 of all tokens from position 0 to the end of the last page offered. That page may be
    one that a finished request did not fill: -1, which no prompt has, stands for what is missing."""

    request: str
    tokens: bytes
    first_page: int
    starts: tuple[Int32s, ...]
    scope: Scope


@dataclass(frozen=True)
class StepPlan(KVConnectorMetadata):
    """Everything the workers do in one step.

    `shards`: index in a plan's `leases` → (pp_rank, tp_rank) of the shard; ranks with equal KV share one.
    `preempted`: requests whose blocks are given back in this step; their stores that still read are revoked.
    `held`: finished requests whose blocks the scheduler keeps until every worker reports that nobody reads or
    writes them any more (finished_sending). A request stands here in every plan from the one with its last stores
    on, until then.
    """

    loads: tuple[LoadPlan, ...] = ()
    stores: tuple[StorePlan, ...] = ()
    preempted: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    shards: tuple[tuple[int, int], ...] = ()


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What a worker did in a step. `ended[load]` counts the workers for which a load is over, well or not: its
    lease may go when all have said so. `failed` are the loads that did not complete everywhere. `unstored` are the
    requests of which an offered page was not taken by the daemon, so that what follows it can't be stored either:
    their pages are offered again, from the first."""

    ended: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    unstored: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Sum over workers."""
        assert isinstance(other, WorkerReport)
        ended = dict(self.ended)
        for load, count in other.ended.items():
            ended[load] = ended.get(load, 0) + count
        return WorkerReport(ended, self.failed | other.failed, self.unstored | other.unstored)


@dataclass(frozen=True)
class WorkerShard(KVConnectorHandshakeMetadata):
    """How one worker registered its KV: with it the scheduler side asks about that worker's shard.

    `starts_per_block`: one per cache group. `refused` says why this worker runs uncached, "" if it does not."""

    model: ModelSpec | None
    layout: L1Layout | None
    shard: ShardSpec
    starts_per_block: tuple[int, ...] = ()
    refused: str = ""
