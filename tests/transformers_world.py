"""A tiny random model, prompts, and runs of them with and without the transformers connector."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

VOCAB = 499
NEW = 8
TOLERANCE = 1e-4


def tiny_llama() -> LlamaForCausalLM:
    """Random weights, float32, large enough logits that greedy choices are no ties."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCAB, (1, length)))


def padded(*prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    return ids, mask


def expected(model, ids, mask=None, new=NEW):
    """Greedy tokens and logits of the model alone."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, torch.stack(out.logits)


def bare(model, connector, ids, mask=None, new=NEW):
    """`model.generate` with the connector's cache; (sequences, logits, stats)."""
    with connector.cache(ids, mask, new) as cache:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        cache.finish(out.sequences)
    connector.flush()
    return out.sequences, torch.stack(out.logits), cache.stats


def whole(model, connector, ids, mask=None, new=NEW):
    """The connector's own generate; (sequences, logits, stats)."""
    out = connector.generate(ids, mask, max_new_tokens=new, output_logits=True)
    connector.flush()
    return out.sequences, torch.stack(out.logits), out.stats


def agree(got, want) -> bool:
    return torch.equal(got[0], want[0]) and float((got[1] - want[1]).abs().max()) <= TOLERANCE
