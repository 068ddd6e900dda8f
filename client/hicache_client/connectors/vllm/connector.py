"""`HiCacheConnector`, as vLLM names it in --kv-transfer-config. Every hook goes to one side, through a guard.

vLLM builds one connector in its scheduler's process and one in each worker. A side that can't be (a model that is not
carried, an option that does not fit) is absent, and every hook then is a miss.
"""

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from hicache.base.errors import HiCacheError
from hicache.spec.model import ShardSpec
from hicache_client.options import ClientOptions
from hicache_client.sync import Client

from . import stats
from .guard import Guard, RefusedError
from .logs import adopt_handlers
from .metadata import StepPlan, WorkerReport, WorkerShard
from .options import OptionsError, VllmOptions, parse_options
from .pool import SharedPlacement, placement
from .scheduler import SchedulerSide, engine_group, scheduler_side
from .spec import Registered, UnknownLayout, register, unsupported
from .version import outside
from .weights import UnknownWeights
from .worker import Place, WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import CacheHitSource

_log = logging.getLogger("hicache.vllm")


class HiCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._placement: SharedPlacement | None = None
        self._options = VllmOptions()
        self._refused = ""
        self._ranks = (0, 0)
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        if role is KVConnectorRole.WORKER:
            self._ranks = (get_pp_group().rank_in_group, get_tensor_model_parallel_rank())
        adopt_handlers(quiet=not self._speaks(role, vllm_config))
        self._guard = Guard("worker side" if role is KVConnectorRole.WORKER else "scheduler side")
        try:
            self._options = parse_options(extra)
        except OptionsError as error:
            self._refuse(str(error), refuse=extra.get("on_error") == "refuse")
        if not self._refused:
            self._check_engine(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            if self._options.load_failure == "recompute":
                self._kv_transfer_config.kv_load_failure_policy = "recompute"  # read after connectors are built
            if not self._refused:
                self._scheduler = self._guard.run(
                    "start", lambda: scheduler_side(vllm_config, self._options), lambda: None
                )

    @staticmethod
    def _speaks(role: KVConnectorRole, vllm_config: Any) -> bool:
        """One process of an engine tells of the daemon's coming and going."""
        if role is KVConnectorRole.SCHEDULER:
            return bool(vllm_config.parallel_config.world_size == 1)
        return bool(get_tensor_model_parallel_rank() == 0 and get_pp_group().rank_in_group == 0)

    def _check_engine(self, vllm_config: Any, kv_cache_config: Any) -> None:
        strange = outside(vllm.__version__)
        if strange:
            _log.warning("hicache: %s; trying all the same", strange)
        reason = unsupported(vllm_config, kv_cache_config)
        if reason:
            self._refuse(reason, refuse=self._options.on_error == "refuse")

    def _refuse(self, reason: str, *, refuse: bool) -> None:
        """Run uncached after one line (the scheduler's, for it hears of all workers), or end vLLM's start."""
        self._refused = reason
        if refuse:
            raise RefusedError(f"hicache: {reason} (on_error is 'refuse')")
        if self._role is KVConnectorRole.SCHEDULER:
            _log.warning("hicache: running uncached: %s", reason)

    # ---- worker -----------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Where vLLM allocates the KV cache: in memory shared with the daemon."""
        if self._refused:
            return None
        sizes = [tensor.size for tensor in self._kv_cache_config.kv_cache_tensors]
        place = placement(self._vllm_config.device_config.device_type, sizes)
        if isinstance(place, str):
            self._refuse(place, refuse=self._options.on_error == "refuse")
            return None
        self._placement = place
        return place

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the KV cache and register it with the daemon, which may take connect_timeout_s."""
        if self._refused:
            return
        refuse = self._options.on_error == "refuse"
        try:
            registered, pool = self._describe(kv_caches)
        except (UnknownLayout, UnknownWeights) as error:
            self._refuse(str(error), refuse=refuse)
            return
        except Exception as error:  # noqa: BLE001 - vLLM's start must not end because we can't read its structures
            self._guard.caught_one("register_kv_caches", error)
            self._refuse(f"the KV cache could not be described: {error}", refuse=refuse)
            return
        options, engine_id = self._options, str(self._kv_transfer_config.engine_id)
        client = Client(
            ClientOptions(
                runtime_dir=options.directory,
                tenant=options.tenant,
                credential=options.credential,
                group=engine_group(engine_id),
                engine=f"vllm {engine_id[:12]} rank {self._ranks[1]}",
                connect_timeout_s=options.connect_timeout_s,
                load_timeout_s=options.load_timeout_s,
                retry_max_s=1.0,
            ),
            registered.model,
            registered.layout,
            registered.shard,
            pool,
        )
        shard = (registered.shard.pp_rank, registered.shard.tp_rank)
        place = Place(registered.model, shard, dict(registered.layers), registered.writes)
        connected = client.connect()
        if not connected and refuse:
            failure: HiCacheError | None = client.failure
            raise RefusedError(f"hicache: {failure or 'the daemon did not answer'} (on_error is 'refuse')")
        self._registered = registered
        self._worker = WorkerSide(options, place, client, pool)
        self._worker.start()

    def _describe(self, kv_caches: dict[str, torch.Tensor]) -> tuple[Registered, Any]:
        place = self._placement
        if place is None or place.pool is None:
            raise UnknownLayout("the KV cache was not placed" if place is None else place.reason)
        registered = register(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            place.pool,
            ranks=self._ranks,
            page_tokens=self._options.page_tokens,
            revision=self._options.revision,
        )
        return registered, place.pool

    def get_handshake_metadata(self) -> WorkerShard:
        """How this worker registered, for the scheduler side."""
        if self._worker is None:
            return WorkerShard(None, None, ShardSpec(), (), self._refused or "its KV cache was not registered")
        return self._registered.handshake()

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before this step overwrites blocks that were given back."""
        worker = self._worker
        if worker is not None and isinstance(kv_connector_metadata, StepPlan):
            plan = kv_connector_metadata
            self._guard.run("handle_preemptions", lambda: worker.handle_preemptions(plan), worker.revoke_all)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        worker = self._worker
        if worker is not None:
            plan = self._plan()
            self._guard.run("start_load_kv", lambda: worker.start_load_kv(plan), lambda: worker.fail_loads(plan))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for this layer's part of the loads that this step reads."""
        worker = self._worker
        if worker is not None:
            self._guard.run("wait_for_layer_load", lambda: worker.wait_for_layer_load(layer_name), worker.fail_sync)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: the daemon reads all layers of a page at once, after the forward."""

    def wait_for_save(self) -> None:
        """Offer what this step completed; no store is waited for."""
        worker = self._worker
        if worker is not None:
            plan = self._plan()
            self._guard.run("wait_for_save", lambda: worker.wait_for_save(plan), worker.end_sync)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Whose blocks are free, whose loads are over, whose failed."""
        worker = self._worker
        if worker is None:
            return KVConnectorTransferResults()
        plan = self._plan() if self.has_connector_metadata() else None
        sent, received, failed = self._guard.run(
            "get_transfer_results", lambda: worker.transfer_results(plan), worker.give_up
        )
        return KVConnectorTransferResults(sent, received, failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same without failures, as vLLM's base class has it."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute anew."""
        return set() if self._worker is None else self._worker.block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What the scheduler side must know of this step."""
        return None if self._worker is None else self._worker.take_report()

    def get_kv_connector_stats(self) -> stats.HiCacheStats | None:
        """What was counted since the last call, on either side."""
        if self._worker is not None:
            self._worker.tally.count(stats.CAUGHT, sum(self._guard.caught.values()))
            self._guard.caught.clear()
            return self._worker.tally.take()
        return None if self._scheduler is None else self._scheduler.take_stats()

    def shutdown(self) -> None:
        """vLLM ends."""
        if self._worker is not None:
            self._guard.run("shutdown", self._worker.shutdown, lambda: None)
        if self._scheduler is not None:
            self._scheduler.shutdown()

    # ---- scheduler --------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """How the workers registered, by (pp_rank, tp_rank)."""
        scheduler = self._scheduler
        if scheduler is not None:
            self._guard.run("set_workers", lambda: scheduler.set_workers(metadata), lambda: None)

    def on_new_request(self, request: Any) -> None:
        """Look it up at once."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond vLLM's own hit that can be loaded; None: ask again."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks that the load goes to."""
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> "dict[CacheHitSource, int]":
        """Tokens by tier: HOST is the daemon's memory, DISK its disk."""
        if self._scheduler is None:
            return {}
        from vllm.v1.metrics.stats import CacheHitSource  # noqa: PLC0415 - 0.31 has none, and never calls this

        split = self._scheduler.get_external_cache_hit_sources(request, num_external_tokens)
        return {CacheHitSource(name): n for name, n in split.items()}

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """The workers' plan for this step."""
        return StepPlan() if self._scheduler is None else self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers' reports."""
        if self._scheduler is not None:
            self._scheduler.update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks stay until a worker gives them back."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.request_finished_all_groups(request, block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same, for one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_block_frees(self) -> bool:
        """Blocks come free without preempting anybody."""
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    def reset_cache(self) -> bool | None:
        """Serve nothing from before."""
        return True if self._scheduler is None else self._scheduler.reset_cache()

    def take_events(self) -> Iterable[Any]:
        """None: the daemon publishes its own (docs/operate/kv-events.md)."""
        return ()

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a miss later, nothing more."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers wait for their loads, which a full graph would skip."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> stats.HiCacheStats:
        """For vLLM's logger."""
        return stats.HiCacheStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> stats.HiCachePromMetrics:
        """`vllm:hicache_*`."""
        return stats.HiCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
