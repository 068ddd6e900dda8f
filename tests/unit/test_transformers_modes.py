"""Ways to run a model that must not change what others are served, nor the output: each against the model alone."""

import copy
import logging
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

from fake_daemon import FakeDaemon  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from hicache_client.connectors.transformers import (  # noqa: E402
    HiCacheConnector,
    UncachedCache,
    UnsupportedModel,
)
from hicache_client.connectors.transformers.weights import WeightsWatch  # noqa: E402
from tests.transformers_world import NEW, agree, bare, expected, padded, prompt, tiny_llama, whole  # noqa: E402


@pytest.fixture
def model() -> LlamaForCausalLM:
    """Its own for each test: they change it."""
    return tiny_llama()


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


def connect(model, daemon, **options) -> HiCacheConnector:
    options = {"pool_tokens": 1024, "l1_reuse": False} | options
    return HiCacheConnector(model, open_port=daemon.open, **options)


def with_cache(model, connector, ids, **options):
    """A caller's own `model.generate` with a cache of the connector, and nothing else said."""
    with connector.cache(ids, max_new_tokens=NEW) as cache:
        out = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, **options)
        cache.finish(out)
    return out


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hicache.transformers"]


# ---- the generation config of the model ---------------------------------------------------------------

CONFIGS = {
    "use_cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "quanto"}},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "max_length": {"max_length": 30},
    "sampling": {"temperature": 0.3, "top_k": 3, "top_p": 0.5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": "high"},
}


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS.keys())
def test_generate_sets_the_models_own_way_of_decoding_aside(model, daemon, fields) -> None:
    ids = torch.cat([prompt(40), prompt(40)], dim=1)
    want = expected(model, ids)
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    own = model.generation_config
    with connect(model, daemon) as connector:
        for served in (0, 79):
            got = whole(model, connector, ids)
            assert agree(got, want)
            assert got[2][0].tokens_l2 == served
    assert model.generation_config is own
    assert all(getattr(own, name) == value for name, value in fields.items())


def test_generation_config_comes_back_after_an_error(model, daemon) -> None:
    class Broken:
        def put(self, value) -> None:
            raise KeyboardInterrupt

        def end(self) -> None:
            pass

    own = model.generation_config
    with connect(model, daemon) as connector, pytest.raises(KeyboardInterrupt):
        connector.generate(prompt(20), streamer=Broken())
    assert model.generation_config is own


def test_what_is_not_set_aside_still_holds(model, daemon) -> None:
    ids = prompt(40)
    model.generation_config.eos_token_id = int(expected(model, ids)[0][0, 42])
    model.generation_config.repetition_penalty = 1.7
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    with connect(model, daemon) as connector:
        assert torch.equal(connector.generate(ids, max_new_tokens=NEW).sequences, want)
        torch.manual_seed(5)
        model.generation_config.temperature = 3.0
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": True}
        want = model.generate(ids, **options)
        torch.manual_seed(5)
        assert torch.equal(connector.generate(ids, max_new_tokens=NEW, do_sample=True).sequences, want)


@pytest.mark.parametrize("said_in_the_call", [{}, {"use_cache": True}, {"use_cache": False}])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_cache_without_use_cache_is_uncached(model, daemon, caplog, said_in_the_call, length) -> None:
    ids = prompt(length)
    want = expected(model, ids)[0]
    with connect(model, daemon) as connector:
        connector.generate(ids)
        connector.flush()
        model.generation_config.use_cache = False
        for _ in range(2):
            assert isinstance(connector.cache(ids), UncachedCache)
            assert torch.equal(with_cache(model, connector, ids, **said_in_the_call), want)
    assert len([m for m in warnings(caplog) if "use_cache=False" in m]) == 1


# ---- changed weights ------------------------------------------------------------------------------------


def _assign(model) -> None:
    torch.manual_seed(77)
    state = {name: torch.randn_like(value) * 0.2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _replace(model) -> None:
    """With a parameter of the same version, shape and dtype."""
    projection = model.model.layers[0].self_attn.v_proj
    fresh = torch.nn.Parameter(torch.zeros_like(projection.weight))
    with torch.no_grad():
        while fresh._version < projection.weight._version:
            fresh.zero_()
    projection.weight = fresh


def _swap_layers(model) -> None:
    layers = model.model.layers
    layers._modules["0"], layers._modules["1"] = layers._modules["1"], layers._modules["0"]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


def _in_place(model) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)


def _one_up_one_down(model) -> None:
    """Two changes that leave the sum of the versions as it was."""
    _replace(model)
    _in_place(model)


def _buffer(model) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _replace_buffer(model) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * 0.5, persistent=False)


def _data(model) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.data * 2


def _data_at_the_same_address(model) -> None:
    """Memory that is given back may come back at once, with other contents."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    twice = (weight.data * 2).numpy()
    shape = weight.shape
    weight.data = torch.empty(0)
    weight.data = torch.from_numpy(twice).clone().view(shape)


def _through_bfloat16(model) -> None:
    model.to(torch.bfloat16).to(torch.float32)


CHANGES = [
    _assign,
    _replace,
    _swap_layers,
    _in_place,
    _one_up_one_down,
    _buffer,
    _replace_buffer,
    _data,
    _data_at_the_same_address,
    _through_bfloat16,
]


@pytest.mark.parametrize(("run", "l1_reuse"), [(whole, False), (whole, True), (bare, False), (bare, True)])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_served_nothing_of_the_old(
    model, daemon, change: Callable[[LlamaForCausalLM], None], run, l1_reuse
) -> None:
    ids = prompt(60)
    with connect(model, daemon, l1_reuse=l1_reuse) as connector:
        run(model, connector, ids)
        change(model)
        cold = run(model, connector, ids)
        assert cold[2][0].recomputed == 60
        assert agree(cold, expected(model, ids))
        warm = run(model, connector, ids)
        assert warm[2][0].recomputed < 60
        assert agree(warm, expected(model, ids))


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_under_a_given_revision_run_uncached(model, daemon, caplog, change) -> None:
    ids = prompt(60)
    with connect(model, daemon, revision="mine", l1_reuse=True) as connector:
        whole(model, connector, ids)
        change(model)
        for run in (whole, bare):
            got = run(model, connector, ids)
            assert got[2][0].recomputed == 60
            assert agree(got, expected(model, ids))
    assert len([m for m in warnings(caplog) if "'mine'" in m]) == 1


@pytest.mark.parametrize("revision", [None, "mine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_never_raises(model, daemon, dtype, revision) -> None:
    ids = prompt(60)
    with connect(model, daemon, revision=revision) as connector:
        whole(model, connector, ids)
        before = set(daemon.pages)
        model.to(dtype)
        want = expected(model, ids)
        for _ in range(2):
            got = whole(model, connector, ids)
            assert torch.equal(got[0], want[0])
        served = dtype != torch.float64 and revision is None
        assert (got[2][0].tokens_l2 == 48) == served
        assert bool(set(daemon.pages) - before) == served


def test_unchanged_weights_are_not_hashed_again(model, daemon) -> None:
    with connect(model, daemon) as connector:
        spec = connector.spec
        for seed in range(3):
            whole(model, connector, prompt(40, seed))
        model.to(torch.float32)
        model.eval()
        whole(model, connector, prompt(40))
        assert connector.spec is spec


def test_weights_that_change_while_a_cache_is_open_are_not_stored(model, daemon) -> None:
    ids = prompt(60)
    with connect(model, daemon) as connector:
        before = copy.deepcopy(model)
        with connector.cache(ids) as cache:
            _in_place(model)
            cache.finish(model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False))
    with connect(before, daemon) as other:
        got = whole(before, other, ids)
        assert got[2][0].recomputed == 60


def test_closed_connector_stays_closed(model, daemon) -> None:
    connector = connect(model, daemon)
    connector.close()
    _in_place(model)
    assert agree(whole(model, connector, prompt(40)), expected(model, prompt(40)))
    assert connector.spec is not None
    assert daemon.pages == {}


def test_watch_sees_tensors_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = tiny_llama()
    watch = WeightsWatch(model)
    assert watch.unchanged()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(3, 3))
    assert not watch.unchanged()


# ---- autocast and training ------------------------------------------------------------------------------


def assert_clean(model, daemon, ids) -> None:
    """Nobody is served what was computed another way."""
    with connect(model, daemon) as other:
        assert agree(whole(model, other, ids), expected(model, ids))


@pytest.mark.parametrize("run", [bare, whole])
@pytest.mark.parametrize("known", [False, True])
def test_autocast_runs_uncached(model, daemon, caplog, run, known) -> None:
    ids = prompt(60)
    with connect(model, daemon, l1_reuse=True) as connector:
        if known:
            run(model, connector, ids)
        with torch.autocast("cpu", torch.bfloat16):
            want = expected(model, ids)
            for _ in range(2):
                got = run(model, connector, ids)
                assert torch.equal(got[1], want[1])
                assert got[2][0].recomputed == 60
        assert connector.counters.unsupported_modes == 2
        assert agree(run(model, connector, ids), expected(model, ids))
    assert_clean(model, daemon, ids)
    assert len([m for m in warnings(caplog) if "autocast" in m]) == 1


@pytest.mark.parametrize("known", [False, True])
def test_autocast_within_the_cache_stores_nothing(model, daemon, known) -> None:
    ids = prompt(60)
    with connect(model, daemon, l1_reuse=True) as connector:
        if known:
            whole(model, connector, ids[:, :40])
        pages = daemon.stored_pages
        with connector.cache(ids) as cache, torch.autocast("cpu", torch.bfloat16):
            cache.finish(model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False))
        assert daemon.stored_pages == pages
        assert agree(whole(model, connector, ids), expected(model, ids))
    assert_clean(model, daemon, ids)


def test_values_of_another_dtype_than_the_keys_leave_the_pool(model, daemon) -> None:
    """A value projection may run in another dtype by itself, without autocast."""
    ids = prompt(60)
    with connect(model, daemon) as connector:
        cache = connector.cache(ids)
        keys = torch.randn(1, 2, 60, 16)
        cache.update(keys, keys.to(torch.bfloat16), 0)
        assert not cache.layers[0].pooled
        cache.finish()
    assert daemon.pages == {} or not any(daemon.pages.values())


@pytest.mark.parametrize("whole_model", [True, False])
@pytest.mark.parametrize("run", [bare, whole])
def test_training_mode_runs_uncached(model, daemon, caplog, run, whole_model) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    ids = prompt(60)
    with connect(model, daemon, l1_reuse=True) as connector:
        (model if whole_model else model.model.layers[1]).train()
        for _ in range(2):
            torch.manual_seed(3)
            want = expected(model, ids)
            torch.manual_seed(3)
            got = run(model, connector, ids)
            assert torch.equal(got[1], want[1])
        model.eval()
        assert agree(run(model, connector, ids), expected(model, ids))
    assert_clean(model, daemon, ids)
    assert len([m for m in warnings(caplog) if "training mode" in m]) == 1


def test_training_mode_within_the_cache_stores_nothing(model, daemon) -> None:
    ids = prompt(60)
    with connect(model, daemon) as connector:
        with connector.cache(ids) as cache:
            model.train()
            cache.finish(model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False))
        assert daemon.stored_pages == 0


# ---- masks that nobody gave -----------------------------------------------------------------------------


def _holes() -> torch.Tensor:
    ids = prompt(60)
    ids[:, 10:20] = 0
    return ids


PADDED = {
    "holes": _holes,
    "left": lambda: padded(prompt(60), prompt(40, 1))[0],
    "right": lambda: torch.nn.functional.pad(prompt(50), (0, 1)),
}


@pytest.mark.parametrize("ids_of", PADDED.values(), ids=PADDED.keys())
@pytest.mark.parametrize("known", [False, True])
def test_padding_tokens_without_a_mask_run_uncached(model, daemon, caplog, ids_of, known) -> None:
    """transformers infers a mask there; the rest of the world, which gives one, must not meet it."""
    ids = ids_of()
    ones = torch.ones_like(ids)
    with connect(model, daemon, l1_reuse=True) as connector:
        if known:
            whole(model, connector, ids, ones)
        want = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        for _ in range(2):
            assert torch.equal(with_cache(model, connector, ids), want)
            assert torch.equal(with_cache(model, connector, ids, attention_mask=ones), expected(model, ids, ones)[0])
        assert agree(whole(model, connector, ids, ones), expected(model, ids, ones))
        assert agree(bare(model, connector, ids, ones), expected(model, ids, ones))
    assert_clean(model, daemon, ids)
    assert len([m for m in warnings(caplog) if "padding token" in m]) == 1


def test_padding_token_that_ends_sequences_hides_nothing(model, daemon) -> None:
    """As of chat templates whose end of turn is the padding token: transformers infers no mask."""
    ids = _holes()
    model.generation_config.eos_token_id = [7, 0]
    with connect(model, daemon) as connector:
        for served in (0, 48):
            with connector.cache(ids, max_new_tokens=NEW) as cache:
                out = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
                cache.finish(out)
            assert cache.stats[0].tokens_l2 == served
            assert torch.equal(out, model.generate(ids, max_new_tokens=NEW, do_sample=False))
            connector.flush()


# ---- caches that are over ---------------------------------------------------------------------------------


@pytest.mark.parametrize("l1_reuse", [False, True])
def test_finished_cache_raises_and_touches_no_columns(model, daemon, l1_reuse) -> None:
    ids = prompt(64)
    with connect(model, daemon, l1_reuse=l1_reuse, pool_tokens=256) as connector:
        cache = connector.cache(ids, max_new_tokens=100)
        first = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
        cache.finish(first)
        longer = torch.cat([first, prompt(64, 8)], dim=1)[:, :120]
        second = connector.generate(longer, max_new_tokens=3).sequences  # with reuse: in the same columns
        before = connector._context.tensors.all.clone()
        for use in (
            lambda: model(input_ids=prompt(40, 50), past_key_values=cache),
            lambda: model.generate(longer, past_key_values=cache, max_new_tokens=3),
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
            cache.reset,
            lambda: copy.deepcopy(cache),
        ):
            with pytest.raises(RuntimeError, match="finished"):
                use()
        cache.crop(10)
        assert cache.get_seq_length() == 0
        assert torch.equal(connector._context.tensors.all, before)
        cache.finish(first)
        assert agree(whole(model, connector, second), expected(model, second))


# ---- models whose tokens don't say it all -------------------------------------------------------------------


def _qwen2_vl():
    text = {
        "vocab_size": 200,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=150)
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


def _t5():
    config = transformers.T5Config(
        vocab_size=200, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(("make", "reason"), [(_qwen2_vl, r"multimodal.*vision_config"), (_t5, "encoder")])
def test_models_that_read_more_than_tokens_are_refused(daemon, make, reason) -> None:
    model = make()
    with pytest.raises(UnsupportedModel, match=reason):
        connect(model, daemon)
    connector = connect(model, daemon, unsupported="uncached")
    assert isinstance(connector.cache(prompt(20) % 100 + 3), UncachedCache)
    assert daemon.pages == {}


def test_multimodal_model_runs_uncached_as_alone(daemon, caplog) -> None:
    model = _qwen2_vl()
    ids = prompt(40) % 100 + 3
    with caplog.at_level(logging.WARNING), connect(model, daemon, unsupported="uncached") as connector:
        assert torch.equal(connector.generate(ids, max_new_tokens=NEW).sequences, expected(model, ids)[0])
    assert any("multimodal" in m for m in warnings(caplog))
