"""What a transformers model's cache looks like: `ModelSpec`, weights digest, L1 layout.

The shapes are those of a probe forward of one token, not of config fields: a model that shares KV between
layers, or whose keys and values differ in width, shows it there.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from hicache.spec.group import DTYPE_BYTES, GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, RopeSpec

_HASH_CHUNK_BYTES = 32 << 20
# Fields of a config that change from machine to machine or never reach a key or value.
_CONFIG_NOISE = frozenset(
    (
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "quantization_config",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
# With these, the keys of a prefix depend on how long the whole sequence is: no prefix is reusable.
_LENGTH_DEPENDENT_ROPE = frozenset(("dynamic", "longrope"))


class UnsupportedModel(ValueError):
    """This model's cache can't be carried; the message names the layers or the field, and the way out."""


def _refuse(text: str) -> UnsupportedModel:
    return UnsupportedModel(f"{text}. Run this model without hicache, or pass unsupported='uncached'.")


def _digest_of(chunk: torch.Tensor) -> bytes:
    return hashlib.sha256(memoryview(chunk.numpy())).digest()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _HASH_CHUNK_BYTES):
        yield flat[start : start + _HASH_CHUNK_BYTES]


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 over every byte of every parameter and buffer, with names, dtypes and shapes: "sha256:…".

    Chunks are hashed on as many threads as torch uses (1.3 GB/s on one; hashlib releases the GIL), so the
    135M-parameter float32 model of the demo costs about 0.3 s, once at start. Tied weights are read once.
    """
    total = hashlib.sha256(b"hicache-weights-1")
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0])
    with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as threads:
        for name, tensor in tensors:
            total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
            for digest in threads.map(_digest_of, _chunks(tensor)):
                total.update(digest)
    return f"sha256:{total.hexdigest()}"


def config_digest(model: PreTrainedModel) -> str:
    """SHA-256 of the config's fields that can reach a key or value (norm epsilon, activation, …)."""
    config = model.config.get_text_config(decoder=True).to_dict()
    kept = {k: v for k, v in config.items() if k not in _CONFIG_NOISE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def rope_spec(model: PreTrainedModel, head_dim: int) -> RopeSpec:
    """RoPE from the config; raises `UnsupportedModel` where keys depend on the sequence's length."""
    config = model.config.get_text_config(decoder=True)
    params: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    if not params:
        return RopeSpec()
    kind = str(params.get("rope_type", "default"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise _refuse(f"rope type {kind!r} makes keys depend on the length of the whole sequence")
    return RopeSpec(
        kind=kind,
        base=float(params.get("rope_theta", 0.0)),
        rotary_dim=int(head_dim * float(params.get("partial_rotary_factor", 1.0))),
        scaling=json.dumps(params, sort_keys=True, default=str),
    )


def _probe(model: PreTrainedModel, config: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(keys, values) of each cache layer after a forward of one token, each [1, heads, 1, dim]."""
    cache = DynamicCache(config=config)
    with torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=token, past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def _refuse_other_layers(config: Any) -> None:
    types, _ = get_layer_types_and_kwargs(config)
    other = {i: kind for i, kind in enumerate(types) if kind != "full_attention"}
    if other:
        listed = ", ".join(f"{i}: {kind}" for i, kind in list(other.items())[:8])
        more = f" and {len(other) - 8} more" if len(other) > 8 else ""
        raise _refuse(f"only full-attention layers are carried, but this model has layers {listed}{more}")
    if getattr(config, "kv_lora_rank", None):
        raise _refuse("latent attention (kv_lora_rank) in all layers is not carried yet")


def _refuse_other_inputs(model: PreTrainedModel) -> None:
    """Keys and values that depend on more than token ids would be served for other images or sounds."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse("the decoder's cache depends on what the encoder was given, not on its tokens alone")
    parts = {*(getattr(config, "sub_configs", None) or {}), "vision_config", "audio_config"} - {"text_config"}
    present = sorted(name for name in parts if getattr(config, name, None) is not None)
    if present:
        raise _refuse(
            f"this is a multimodal model ({', '.join(present)}), and this connector identifies a prefix by its "
            "token ids, which are the same for every image or sound"
        )


def describe_model(model: PreTrainedModel, page_tokens: int, revision: str | None = None) -> ModelSpec:
    """The model as the daemon sees it. Costs one forward of one token, and `weights_digest` unless
    `revision` is given. Raises `UnsupportedModel` naming the layers that stand in the way."""
    if model.device.type != "cpu":
        raise _refuse(f"the model is on {model.device}, and this connector's L1 pool is CPU memory")
    config = model.config.get_text_config(decoder=True)
    _refuse_other_inputs(model)
    _refuse_other_layers(config)
    layers = _probe(model, config)
    shapes = {(k.shape[1], k.shape[3], v.shape[3], k.dtype, v.dtype) for k, v in layers}
    if len(shapes) != 1:
        raise _refuse(f"the layers' caches differ in shape: {sorted(map(str, shapes))}")
    heads, key_dim, value_dim, dtype, value_dtype = shapes.pop()
    if key_dim != value_dim or dtype != value_dtype:
        raise _refuse(f"keys ({key_dim} wide, {dtype}) and values ({value_dim} wide, {value_dtype}) differ")
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise _refuse(f"dtype {name} is not one of {sorted(DTYPE_BYTES)}")
    group = GroupSpec(
        name="full",
        kind="full",
        layers=tuple(range(len(layers))),
        kv_heads=heads,
        head_dim=key_dim,
        dtype=name,
        block_tokens=page_tokens,
    )
    weights = revision if revision is not None else weights_digest(model)
    spec = ModelSpec(
        name=f"{model.config.model_type}/{type(model).__name__}",
        revision=f"{weights}+config:{config_digest(model)[:32]}",
        groups=(group,),
        prefix_granularity=page_tokens,
        rope=rope_spec(model, key_dim),
    )
    spec.check()
    return spec


def pool_layout(spec: ModelSpec, pool_tokens: int) -> L1Layout:
    """Per layer a region [2][heads][pool_tokens][dim]; a page may begin at any token column."""
    group = spec.groups[0]
    row = group.head_dim * DTYPE_BYTES[group.dtype]  # one head's K or V of one token
    region = 2 * group.kv_heads * pool_tokens * row
    return L1Layout(
        pool_bytes=region * len(group.layers),
        groups=(
            GroupLayout(
                group=group.name,
                layer_offsets=tuple(i * region for i in range(len(group.layers))),
                blocks=pool_tokens - group.block_tokens + 1,
                block_stride=row,
                axes=(Axis(2, group.kv_heads * pool_tokens * row), Axis(group.kv_heads, pool_tokens * row)),
                run_bytes=group.block_tokens * row,
            ),
        ),
    )
