"""A transformers model as the daemon sees it: what is carried, what is refused, what changes its identity."""

import copy
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

from fake_daemon import FakeDaemon  # noqa: E402

from hicache.spec.layout import check_layout  # noqa: E402
from hicache_client.connectors.transformers import (  # noqa: E402
    HiCacheConnector,
    UncachedCache,
    UnsupportedModel,
    weights_digest,
)
from hicache_client.connectors.transformers.spec import describe_model, pool_layout  # noqa: E402

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes))).eval()


def test_spec_says_what_the_cache_holds() -> None:
    spec = describe_model(llama(), 16)
    group = spec.groups[0]
    assert (group.kind, group.layers, group.kv_heads, group.head_dim) == ("full", (0, 1), 2, 8)
    assert (group.dtype, group.block_tokens, spec.prefix_granularity) == ("float32", 16, 16)
    assert (spec.rope.kind, spec.rope.base, spec.rope.rotary_dim) == ("default", 10000.0, 8)
    assert describe_model(llama().to(torch.bfloat16), 16).groups[0].dtype == "bfloat16"


@pytest.mark.parametrize("columns", [16, 17, 100])
def test_layout_stays_in_the_pool(columns) -> None:
    spec = describe_model(llama(), 16)
    layout = pool_layout(spec, columns)
    check_layout(spec, layout)
    assert layout.pool_bytes == 2 * 2 * 2 * columns * 8 * 4
    assert layout.groups[0].blocks == columns - 15


def test_equal_models_have_equal_fingerprints() -> None:
    twin = llama()
    twin.config._name_or_path = "/elsewhere"
    assert describe_model(llama(), 16).fingerprint() == describe_model(twin, 16).fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"num_attention_heads": 8},
    ],
)
def test_what_reaches_the_keys_reaches_the_fingerprint(changes) -> None:
    assert describe_model(llama(), 16).fingerprint() != describe_model(llama(**changes), 16).fingerprint()


def test_page_size_dtype_and_revision_reach_the_fingerprint() -> None:
    prints = {
        describe_model(llama(), 16).fingerprint(),
        describe_model(llama(), 32).fingerprint(),
        describe_model(llama().to(torch.bfloat16), 16).fingerprint(),
        describe_model(llama(), 16, revision="a").fingerprint(),
        describe_model(llama(), 16, revision="b").fingerprint(),
    }
    assert len(prints) == 5


def test_one_changed_bit_of_any_weight_changes_the_digest() -> None:
    model = llama()
    before = weights_digest(model)
    assert before == weights_digest(copy.deepcopy(model))
    for _, parameter in model.named_parameters():
        flat = parameter.data.view(-1).view(torch.int32)
        flat[-1] ^= 1
        assert weights_digest(model) != before
        flat[-1] ^= 1
    assert weights_digest(model) == before


def test_chunking_does_not_hide_a_change(monkeypatch) -> None:
    monkeypatch.setattr("hicache_client.connectors.transformers.spec._HASH_CHUNK_BYTES", 100)
    test_one_changed_bit_of_any_weight_changes_the_digest()


def gemma():
    config = transformers.Gemma3TextConfig(
        **SIZES, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    )
    return transformers.Gemma3ForCausalLM(config)


def deepseek():
    sizes = SIZES | {"num_key_value_heads": 4, "head_dim": 8}
    config = transformers.DeepseekV2Config(
        **sizes,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
    )
    return transformers.DeepseekV2ForCausalLM(config)


def mamba():
    sizes = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.JambaConfig(
        **sizes,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        pad_token_id=0,
    )
    return transformers.JambaForCausalLM(config)


def dynamic_rope():
    return llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})


@pytest.mark.parametrize(
    ("make", "names"),
    [(gemma, "0: sliding_attention"), (mamba, "0: "), (deepseek, "kv_lora_rank"), (dynamic_rope, "'dynamic'")],
)
def test_other_models_are_refused_by_name_or_run_uncached(make, names) -> None:
    torch.manual_seed(0)
    model = make().eval()
    with pytest.raises(UnsupportedModel, match=names):
        HiCacheConnector(model, open_port=FakeDaemon().open)
    ids = torch.tensor([[5, 6, 7, 8, 9] * 5])
    with HiCacheConnector(model, unsupported="uncached", open_port=FakeDaemon().open) as connector:
        assert isinstance(connector.cache(ids), UncachedCache)
        got = connector.generate(ids, max_new_tokens=4)
    want = model.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(got.sequences, want)
    assert got.stats[0].recomputed == 25


def test_importing_the_client_loads_no_torch() -> None:
    code = "import sys, hicache_client; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
