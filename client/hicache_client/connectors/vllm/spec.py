"""What a vLLM worker's KV cache looks like to the daemon: model, layout, shard. What is unknown is refused by name.

vLLM's per-layer view is always logical [blocks, heads, tokens, content]; strides tell where it lies.

Where tokens follow each other inside a block (MLA), a block of N tokens may be cut into N/P pages of P tokens:

    page j of block b, head h, token t:  view.data_ptr + b·sB + h·sH + (j·P + t)·sN     (strides in bytes)

vLLM's CPU attention keeps K of a block and head as [dim][token], or in AMX tiles, and V behind it as [token][dim]:
the bytes of one token are spread over the block, differently for each block size. So there a page is a whole block,
and the order that decides what L2 holds names kernel and block size. Still no token's bytes depend on those after
it: a block may be resumed at any of its tokens.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from hicache.base.errors import HiCacheError
from hicache.spec.group import DTYPE_BYTES, GroupKind, GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout, check_layout
from hicache.spec.model import ModelSpec, RopeSpec, ShardSpec
from hicache_client.pool import SharedPool

from .metadata import WorkerShard
from .weights import weights_revision

PAGE_TOKENS = 16
_KINDS: dict[type, GroupKind] = {FullAttentionSpec: "full", MLAAttentionSpec: "latent"}
# Speculation whose drafts come from elsewhere than layers with a KV cache of their own.
_CACHELESS_DRAFTS = frozenset(("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"))
# With these, keys depend on how long the model is allowed to get.
_LENGTH_DEPENDENT_ROPE = frozenset(("dynamic", "longrope"))
# Fields of a config that never reach a key or value, or differ from machine to machine.
_CONFIG_NOISE = frozenset(
    ("_name_or_path", "architectures", "auto_map", "id2label", "label2id", "transformers_version")
)


class UnknownLayout(ValueError):
    """This engine's KV cache can't be carried; the message says what was expected and what was found."""


@dataclass(frozen=True)
class Registered:
    """One worker's KV cache, described. `layers`: index of each layer's cache in the model's order; of a layer that
    uses another's cache, the other's. `writes`: this rank stores (of ranks with equal KV, the first does)."""

    model: ModelSpec
    layout: L1Layout
    shard: ShardSpec
    starts_per_block: tuple[int, ...]
    layers: Mapping[str, int] = field(default_factory=dict)
    writes: bool = True

    def handshake(self) -> WorkerShard:
        """What the scheduler side needs of it."""
        return WorkerShard(self.model, self.layout, self.shard, self.starts_per_block)


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine can't be cached, as far as its configuration tells; "" if nothing speaks against it."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}: context parallelism is not carried yet, only 1 is"
    if speculative is not None and speculative.method not in _CACHELESS_DRAFTS:
        return (
            f"speculative decoding by {speculative.method!r} keeps KV of drafts, which depends on tokens that come "
            f"later; carried are {', '.join(sorted(_CACHELESS_DRAFTS))}"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales changes what stored KV means from one start to the next"
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        reason = _unsupported_group(group)
        if reason:
            return f"cache group {index} ({group.layer_names[0]} and {len(group.layer_names) - 1} more): {reason}"
    return "" if kv_cache_config.kv_cache_groups else "the model has no KV cache"


def _one_spec(group: Any) -> Any:
    """The spec of all layers of a group; None if they differ."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs = list(spec.kv_cache_specs.values())
        return specs[0] if all(each == specs[0] for each in specs) else None
    return spec


def _unsupported_group(group: Any) -> str:
    spec = _one_spec(group)
    if spec is None:
        return "its layers differ in shape"
    kind = type(spec).__name__
    if type(spec) not in _KINDS:
        return f"kind {kind} is not carried yet, only {', '.join(each.__name__ for each in _KINDS)}"
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        return "vLLM does not let it be transferred"
    if getattr(group, "is_eagle_group", False):
        return "it holds KV of drafts"
    name = str(spec.dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        return f"dtype {name} is not one of {', '.join(sorted(DTYPE_BYTES))}"
    if getattr(spec, "tokens_per_state", 1) != 1:
        return f"one state of it covers {spec.tokens_per_state} tokens, expected 1"
    vectors = 1 if _KINDS[type(spec)] == "latent" else 2
    content = getattr(spec, "state_content_size_bytes", None)
    expected = vectors * spec.head_size * DTYPE_BYTES[name]
    if content is not None and content != expected:
        return f"a token of a head takes {content} bytes, expected {vectors}·{spec.head_size}·{DTYPE_BYTES[name]}"
    return ""


def register(  # noqa: PLR0913 - what decides a worker's identity, each from another part of vLLM
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    pool: SharedPool,
    *,
    ranks: tuple[int, int],
    page_tokens: int = 0,
    revision: str = "",
) -> Registered:
    """Describe the registered tensors. `ranks` = (pp_rank, tp_rank). Raises `UnknownLayout`."""
    names = sorted({name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}, key=_in_order)
    order = {name: i for i, name in enumerate(names)}
    groups, places, cuts = [], [], []
    chosen = page_tokens or _default_page(kv_cache_config.kv_cache_groups, kv_caches)
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = _one_spec(group)
        own = sorted(group.layer_names, key=_in_order)
        layers = {name: _tensor(kv_caches, name) for name in own}
        first = layers[own[0]]
        kind = _KINDS[type(spec)]
        described = GroupSpec(
            name=f"{kind}{index}" if index else kind,
            kind=kind,
            layers=tuple(order[name] for name in own),
            kv_heads=first.shape[1],
            head_dim=spec.head_size,
            dtype=str(first.dtype).removeprefix("torch."),
            block_tokens=chosen,
        )
        groups.append(described)
        packing = _packing(vllm_config, spec) if kind == "full" else ""
        places.append(_place(described, layers, pool, packing))
        cuts.append(spec.block_size // chosen)
    shard, writes = _shard(vllm_config, kv_cache_config, ranks, latent=all(g.kind == "latent" for g in groups))
    model = ModelSpec(
        name=str(vllm_config.model_config.hf_config.model_type),
        revision=_identity(vllm_config, revision),
        groups=tuple(groups),
        prefix_granularity=chosen,
        rope=_rope(vllm_config.model_config, groups[0].head_dim),
    )
    layout = L1Layout(pool.size_bytes, tuple(places))
    try:
        model.check()
        check_layout(model, layout)
    except HiCacheError as error:
        raise UnknownLayout(error.message) from error
    return Registered(model, layout, shard, tuple(cuts), _sharing(order, kv_caches), writes)


def _in_order(name: str) -> tuple[list[int], str]:
    """Layers in the order of the model: by the numbers in their names."""
    return [int(part) for part in re.findall(r"\d+", name)], name


def _tensor(kv_caches: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    tensor = kv_caches.get(name)
    if not isinstance(tensor, torch.Tensor):
        raise UnknownLayout(f"layer {name}: expected one tensor, vLLM registered {type(tensor).__name__}")
    if tensor.dim() != 4 or tensor.stride(3) != 1:
        raise UnknownLayout(
            f"layer {name}: expected [blocks, heads, tokens, content] with contiguous content, got shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}"
        )
    return tensor


def _default_page(groups: Sequence[Any], kv_caches: Mapping[str, torch.Tensor]) -> int:
    blocks = [_tensor(kv_caches, group.layer_names[0]).shape[2] for group in groups]
    cuttable = all(_KINDS[type(_one_spec(group))] == "latent" for group in groups)
    return PAGE_TOKENS if cuttable and all(tokens % PAGE_TOKENS == 0 for tokens in blocks) else min(blocks)


def _packing(vllm_config: Any, spec: Any) -> str:
    """Which kernel of vLLM's CPU attention writes blocks, and of how many tokens."""
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    kernel = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache_dtype)
    return f"cpu-{kernel}-{spec.block_size}"


def _place(group: GroupSpec, layers: Mapping[str, torch.Tensor], pool: SharedPool, packing: str) -> GroupLayout:
    tensors = list(layers.values())
    first, page = tensors[0], group.block_tokens
    item = first.element_size()
    for name, tensor in layers.items():
        if (tensor.shape, tensor.stride(), tensor.dtype) != (first.shape, first.stride(), first.dtype):
            raise UnknownLayout(f"layer {name}: shape {list(tensor.shape)} differs from the first of its group")
        if not pool.address <= tensor.data_ptr() < pool.address + pool.size_bytes:
            raise UnknownLayout(f"layer {name}: its KV cache lies outside of the shared pool")
    blocks, heads, tokens, content = first.shape
    s_block, s_head, s_token = (first.stride(axis) * item for axis in range(3))
    if group.kind == "full":
        if page != tokens or s_token != content * item:
            raise UnknownLayout(
                f"group {group.name}: page_tokens is {page}, expected {tokens}: vLLM's CPU attention packs a block "
                "as a whole; leave page_tokens out, and set block_size for smaller pages"
            )
        return GroupLayout(
            group=group.name,
            layer_offsets=tuple(tensor.data_ptr() - pool.address for tensor in tensors),
            blocks=blocks,
            block_stride=s_block,
            axes=(Axis(heads, s_head),),
            run_bytes=tokens * content * item,
            order=f"head,{packing}",
        )
    if tokens % page:
        raise UnknownLayout(
            f"group {group.name}: page_tokens {page} does not divide the {tokens} tokens of a block: change either"
        )
    cut = tokens // page
    by_head = s_head >= s_token
    inner = (Axis(heads, s_head), Axis(page, s_token))
    return GroupLayout(
        group=group.name,
        layer_offsets=tuple(tensor.data_ptr() - pool.address for tensor in tensors),
        blocks=blocks * cut,
        block_stride=s_block,
        axes=inner if by_head else inner[::-1],
        run_bytes=content * item,
        order="head,token,content" if by_head else "token,head,content",
        starts_per_block=cut,
        start_stride=page * s_token if cut > 1 else 0,
    )


def _sharing(order: Mapping[str, int], kv_caches: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Index by name, layers that use another's cache included."""
    at = {kv_caches[name].data_ptr(): index for name, index in order.items()}
    return {name: at[tensor.data_ptr()] for name, tensor in kv_caches.items() if tensor.data_ptr() in at}


def _shard(vllm_config: Any, kv_cache_config: Any, ranks: tuple[int, int], *, latent: bool) -> tuple[ShardSpec, bool]:
    """Ranks with equal KV are one shard, of which the first writes: all ranks with a latent cache (MLA), and those
    that share a KV head when there are fewer heads than ranks."""
    parallel, (pp_rank, tp_rank) = vllm_config.parallel_config, ranks
    tp_size = parallel.tensor_parallel_size
    replicas = tp_size if latent else max(1, getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    if tp_size % replicas:
        raise UnknownLayout(f"{replicas} of {tp_size} tensor-parallel ranks hold the same KV: expected a divisor")
    shard = ShardSpec(
        tp_rank=tp_rank // replicas,
        tp_size=tp_size // replicas,
        pp_rank=pp_rank,
        pp_size=parallel.pipeline_parallel_size,
    )
    return shard, tp_rank % replicas == 0


def _identity(vllm_config: Any, revision: str) -> str:
    """Weights, and everything else that decides what a token's KV is: "…+config:…"."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    weights = revision or weights_revision(model, vllm_config.load_config)
    kept = {k: v for k, v in model.hf_text_config.to_dict().items() if k not in _CONFIG_NOISE}
    rope = _rope_parameters(model)
    if str(rope.get("rope_type", rope.get("type"))) in _LENGTH_DEPENDENT_ROPE:
        kept["max_model_len"] = model.max_model_len
    kept |= {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "pooling": str(getattr(model, "runner_type", "")),
    }
    digest = hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    return f"{weights}+config:{digest}"


def _rope_parameters(model: Any) -> dict[str, Any]:
    config = model.hf_text_config
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return dict(found)


def _rope(model: Any, head_dim: int) -> RopeSpec:
    params = _rope_parameters(model)
    if not params:
        return RopeSpec()
    return RopeSpec(
        kind=str(params.get("rope_type", params.get("type", "default"))),
        base=float(params.get("rope_theta", 0.0) or 0.0),
        rotary_dim=int(head_dim * float(params.get("partial_rotary_factor", 1.0) or 1.0)),
        scaling=json.dumps(params, sort_keys=True, default=str),
    )
