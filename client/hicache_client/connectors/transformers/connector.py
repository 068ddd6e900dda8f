"""`HiCacheConnector`: a transformers model on the CPU, with its KV cache in hicache."""

import copy
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from hicache.protocol.messages import Scope
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec
from hicache_client.options import ClientOptions

from .batch import Batch, Context, Counters, KeyValues, LateLoad, Row, RowStats, open_batch
from .cache import HiCache, UncachedCache, rows_of
from .layer import Frame, PoolLayer, PoolTensors
from .pool import ColumnPool, Tokens
from .port import DaemonPort, Port
from .spec import UnsupportedModel, describe_model, pool_layout
from .weights import WeightsWatch

log = logging.getLogger("hicache.transformers")


# Fields of a model's own generation config that choose another cache or another way of decoding than the one
# that `generate` is asked for.
_SET_ASIDE = (
    "assistant_early_exit",
    "cache_config",
    "cache_implementation",
    "constraints",
    "diversity_penalty",
    "dola_layers",
    "force_words_ids",
    "is_assistant",
    "low_memory",
    "max_cache_len",
    "max_length",
    "num_beam_groups",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "use_mtp",
)

OpenPort = Callable[[ModelSpec, L1Layout], tuple[Port, Any]]  # the second is the L1 pool's writable buffer


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """`sequences` [rows, width + new tokens] as `model.generate` returns them; `stats` one per row.

    `logits`, if asked for: one [rows, vocabulary] tensor per generated token.
    """

    sequences: torch.Tensor
    stats: tuple[RowStats, ...]
    logits: tuple[torch.Tensor, ...] | None = None


class _FirstToken(StoppingCriteria):  # type: ignore[misc]
    """Notes when the first token was chosen; never stops."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.at_s is None:
            self.at_s = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class HiCacheConnector:
    """Serves the KV cache of one model in this process. Use it from one thread.

    - `runtime_dir`: where the daemon listens; None takes the client's default.
    - `credential`: the tenant's, if the daemon's configuration lists tenants; read it from a file, not from code.
    - `tenant`, `salt`, `lora`: who may share with whom; `lora` is the adapter's content digest or unique id.
    - `pool_tokens`: columns of the L1 pool: prompts, generated tokens and padding of everything running, and
      of finished sequences for as long as there is room.
    - `page_tokens`: prefix granularity P; prompts share whole pages.
    - `revision`: identifies the weights; None hashes all of them at start and again when one changed. With a
      name given, changed weights run uncached: the name is no longer true of them.
    - `l1_reuse`: finished sequences stay in L1 and are continued in place or copied.
    - `unsupported`: "error" raises `UnsupportedModel` for a model that hicache can't carry, "uncached" runs it
      on ordinary caches.
    - `load_timeout_s`: a load that takes longer is given up and computed instead.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        model: PreTrainedModel,
        *,
        runtime_dir: str | Path | None = None,
        tenant: str = "default",
        credential: str = "",
        salt: str = "",
        lora: str = "",
        pool_tokens: int = 8192,
        page_tokens: int = 16,
        revision: str | None = None,
        l1_reuse: bool = True,
        unsupported: Literal["error", "uncached"] = "error",
        load_timeout_s: float = 10.0,
        open_port: OpenPort | None = None,
    ) -> None:
        if pool_tokens < page_tokens:
            raise ValueError(f"pool_tokens {pool_tokens} must be at least page_tokens {page_tokens}")
        self.model = model
        self._scope = Scope(salt=salt, lora=lora)
        self._revision = revision
        self._page_tokens, self._pool_tokens = page_tokens, pool_tokens
        self._l1_reuse, self._load_timeout_s = l1_reuse, load_timeout_s
        self._open_port = open_port or _opener(runtime_dir, tenant, credential)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.counters = Counters()
        self.spec: ModelSpec | None = None
        self._context: Context | None = None
        self._warned: set[str] = set()
        self._closed = False
        try:
            self._connect()
        except UnsupportedModel as error:
            if unsupported == "error":
                raise
            log.warning("running uncached: %s", error)

    @property
    def connected(self) -> bool:
        """Whether a session with the daemon is open, as far as known without asking."""
        return self._context is not None and self._context.port.connected

    # ---- public -------------------------------------------------------------------------------------

    def cache(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int = 256,
        *,
        salt: str | None = None,
        lora: str | None = None,
    ) -> HiCache | UncachedCache:
        """A cache for one `model.generate(input_ids, attention_mask=…, past_key_values=cache)`.

        `input_ids` [rows, width], left-padded where `attention_mask` is 0. All rows resume at one column, that
        of the shortest hit; `generate` of this class lets each row keep its own. Columns for `max_new_tokens`
        are held; a longer generation goes on in tensors of its own. Without a mask there is no padding: ids
        for which transformers would infer some run uncached, and so does a model with `use_cache=False`.
        """
        forgetful = self.model.generation_config.use_cache is False
        rows, batch = self._rows(input_ids, attention_mask, self._scope_of(salt, lora)), None
        if rows is None or (attention_mask is None and self._mask_is_inferred(input_ids)):
            rows = self._masked(input_ids)
        elif forgetful:
            self._uncached("the model's generation config says use_cache=False")
        else:
            batch = self._open(rows, input_ids.shape[1], max_new_tokens)
        if batch is None:
            return UncachedCache(self._text_config(), rows, forgetful)
        batch.begin(uniform=True)
        return HiCache(batch, self._stop_tokens(None))

    def generate(  # noqa: PLR0913 (what transformers takes, by keyword and named)
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int = 64,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        streamer: Any = None,
        output_logits: bool = False,
        salt: str | None = None,
        lora: str | None = None,
    ) -> GenerateResult:
        """`model.generate` with the cache around it, greedy by default: each row computes only what it lacks itself.

        `input_ids` [rows, width], left-padded where `attention_mask` is 0. The sampling parameters and
        `stopping_criteria`, `streamer` are those of transformers; None takes the model's generation config, of
        which other ways of decoding, other caches and `max_length` are set aside.
        """
        start_s = time.perf_counter()
        config = self._generation_config(
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            output_logits=output_logits or None,
            return_dict_in_generate=True,
        )
        rows, batch = self._rows(input_ids, attention_mask, self._scope_of(salt, lora)), None
        if rows is None:
            rows = self._masked(input_ids)
        else:
            batch = self._open(rows, input_ids.shape[1], max_new_tokens)
        cache: HiCache | UncachedCache = UncachedCache(self._text_config(), rows)
        if batch is not None and self._prefill_rows(batch):
            cache = HiCache(batch, self._stop_tokens(config))
        first = _FirstToken()
        with cache, self._own_config_aside():
            output = self.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids) if attention_mask is None else attention_mask,
                generation_config=config,
                past_key_values=cache,
                stopping_criteria=StoppingCriteriaList([*(stopping_criteria or ()), first]),
                streamer=streamer,
            )
            cache.finish(output.sequences)
        ttft_ms = None if first.at_s is None else (first.at_s - start_s) * 1e3
        stats = tuple(replace(row, ttft_ms=ttft_ms) for row in cache.stats)
        return GenerateResult(output.sequences, stats, output.logits)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything stored so far is visible to every engine; False if some of it will not be."""
        return self._context is None or self._context.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Let stores end, then the session. Caches handed out before must not be used any more."""
        self._closed = True
        self._disconnect(timeout_s)

    def _disconnect(self, timeout_s: float = 10.0) -> None:
        if self._context is not None:
            self._context.flush(timeout_s)
            self._context.port.close()
            self._context = None

    def __enter__(self) -> "HiCacheConnector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------------

    def _connect(self) -> None:
        try:
            self.spec = describe_model(self.model, self._page_tokens, self._revision)
        finally:
            self._watch = WeightsWatch(self.model)  # a model that was refused is looked at again when it changed
        port, buffer = self._open_port(self.spec, pool_layout(self.spec, self._pool_tokens))
        self._context = Context(
            page_tokens=self._page_tokens,
            layers=len(self.spec.groups[0].layers),
            tensors=PoolTensors(buffer, self.spec, self._pool_tokens),
            pool=ColumnPool(self._pool_tokens, self._load_timeout_s),
            port=port,
            prefill=self._prefix_kv,
            inexact=lambda: self.model.training or torch.is_autocast_enabled(self.model.device.type),
            unchanged=self._watch.unchanged,
            l1_reuse=self._l1_reuse,
            load_timeout_s=self._load_timeout_s,
            counters=self.counters,
        )

    def _rows(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, scope: Scope) -> list[Row] | None:
        """The prompts without their padding; None if the mask is not one of left padding."""
        pads = _left_padding(input_ids, attention_mask)
        if pads is None:
            return None
        tokens = rows_of(input_ids, pads)
        return [Row(np.ascontiguousarray(t), pad, scope) for t, pad in zip(tokens, pads, strict=True)]

    def _masked(self, input_ids: torch.Tensor) -> list[Row]:
        """Rows of a request whose mask can't be served, for its stats only."""
        self.counters.unsupported_masks += 1
        return [Row(tokens, 0, self._scope) for tokens in rows_of(input_ids, [0] * len(input_ids))]

    def _open(self, rows: list[Row], width: int, max_new_tokens: int) -> Batch | None:
        if torch.is_autocast_enabled(self.model.device.type):
            self._uncached("autocast is enabled, so keys and values are not computed in the model's own dtype")
            return None
        if not self.model.training:  # else each step of an optimizer would have them hashed again
            self._follow_weights()
        if self.model.training or self._watch.training():
            self._uncached("the model is in training mode, call model.eval()")
            return None
        return None if self._context is None else open_batch(self._context, rows, width, max_new_tokens)

    def _uncached(self, reason: str) -> None:
        self.counters.unsupported_modes += 1
        self._warn_once(reason)

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("running uncached: %s (said once)", reason)

    def _mask_is_inferred(self, input_ids: torch.Tensor) -> bool:
        """Would transformers, given no mask, take the padding token's places in these ids for padding?"""
        config = self.model.generation_config
        pad = config.pad_token_id
        if pad is None or pad in self._stop_tokens(None) or not bool((input_ids == pad).any()):
            return False
        self._warn_once(
            f"a prompt without attention_mask contains the padding token {pad}, which transformers takes for "
            "padding. Pass the attention_mask to cache() and to model.generate()"
        )
        return True

    def _prefill_rows(self, batch: Batch) -> bool:
        """Bring every row to its last token, one by one where that computes fewer tokens than all at once.

        False if a load is late: the request then starts again on an ordinary cache.
        """
        together = len(batch.rows) * (batch.width - batch.resume_column())
        shares = batch.shareable()
        apart = sum(
            len(row.prompt) - (share[1] if share else row.available)
            for row, share in zip(batch.rows, shares, strict=True)
        )
        if len(batch.rows) == 1 or apart >= together:
            batch.begin(uniform=True)
            return True
        batch.share(shares)
        batch.begin(uniform=False)
        try:
            for row in batch.rows:
                self._prefill_row(batch, row)
        except LateLoad:
            batch.finish()
            return False
        batch.show(batch.width - 1)
        return True

    def _prefill_row(self, batch: Batch, row: Row) -> None:
        batch.take_from_sibling(row)
        begin, end = row.used, len(row.prompt) - 1
        if begin >= end:
            return
        frame = Frame(row.column, 1, batch.frame.stride, batch.frame.capacity - row.pad)
        layers = [
            PoolLayer(
                i,
                batch.context.tensors,
                frame,
                before_write=lambda layer, _: batch.wait_row(row, layer),
                after_write=lambda _: None,
            )
            for i in range(batch.context.layers)
        ]
        for layer in layers:
            layer.resize(begin)
        self._forward(row.prompt[begin:end], begin, Cache(layers=layers))

    def _prefix_kv(self, tokens: Tokens) -> KeyValues:
        """Per layer keys and values of a prefix, computed from nothing."""
        cache = DynamicCache(config=self._text_config())
        self._forward(tokens, 0, cache)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _forward(self, tokens: Tokens, position: int, cache: Cache) -> None:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        positions = torch.arange(position, position + len(tokens))[None]
        keep = {"logits_to_keep": 1} if self._keeps_logits else {}
        with torch.no_grad():
            self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **keep)

    def _text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    def _scope_of(self, salt: str | None, lora: str | None) -> Scope:
        return Scope(salt=self._scope.salt if salt is None else salt, lora=self._scope.lora if lora is None else lora)

    def _generation_config(self, **given: Any) -> GenerationConfig:
        config = copy.deepcopy(self.model.generation_config)
        for name in _SET_ASIDE:
            if hasattr(config, name):
                setattr(config, name, None)
        config.num_beams = config.num_return_sequences = 1
        config.use_cache = True
        if not given["do_sample"]:  # sampling parameters of the model's own config would only be warned about
            config.temperature = config.top_k = config.top_p = None
        config.update(**{key: value for key, value in given.items() if value is not None})
        return config

    @contextmanager
    def _own_config_aside(self) -> Iterator[None]:
        """transformers fills what is None in a given generation config from the model's own: give it none."""
        own = self.model.generation_config
        self.model.generation_config = GenerationConfig()
        try:
            yield
        finally:
            self.model.generation_config = own

    def _stop_tokens(self, config: GenerationConfig | None) -> frozenset[int]:
        eos = (config or self.model.generation_config).eos_token_id
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    def _follow_weights(self) -> None:
        if self._closed or self._watch.unchanged():
            return
        self._disconnect()
        self.spec = None
        try:
            if self._revision is not None:
                self._watch = WeightsWatch(self.model)
                log.warning("the weights changed under the given revision %r: running uncached", self._revision)
            else:
                log.warning("the model's weights changed: hashing them again, nothing of the old ones is reused")
                self._connect()
        except UnsupportedModel as error:
            log.warning("running uncached: %s", error)


def _opener(runtime_dir: str | Path | None, tenant: str, credential: str) -> OpenPort:
    options = ClientOptions(
        runtime_dir=None if runtime_dir is None else Path(runtime_dir),
        tenant=tenant,
        credential=credential,
        engine=f"transformers {transformers.__version__}",
    )

    def open_port(spec: ModelSpec, layout: L1Layout) -> tuple[Port, Any]:
        port = DaemonPort(options, spec, layout)
        return port, port.pool.buffer

    return open_port


def _left_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int] | None:
    """Padding columns before each row; None unless each row is zeros, then at least one one."""
    rows, width = input_ids.shape
    if attention_mask is None:
        return [0] * rows if width else None
    mask = attention_mask.to("cpu", torch.bool)
    if mask.shape != input_ids.shape or not width:
        return None
    pads = (~mask).sum(dim=1)
    expected = torch.arange(width)[None] >= pads[:, None]
    if not torch.equal(mask, expected) or bool((pads >= width).any()):
        return None
    return [int(p) for p in pads]
