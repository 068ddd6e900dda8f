"""The transformers connector against an in-process daemon: outputs with and without the cache must agree."""

import copy
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

from fake_daemon import FakeDaemon  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from hicache_client.connectors.transformers import HiCacheConnector, UncachedCache  # noqa: E402
from tests.transformers_world import NEW, agree, bare, expected, padded, prompt, tiny_llama, whole  # noqa: E402


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


def connect(model, daemon, **options) -> HiCacheConnector:
    options = {"pool_tokens": 1024, "l1_reuse": False} | options
    return HiCacheConnector(model, open_port=daemon.open, **options)


@pytest.fixture
def connector(model, daemon) -> Iterator[HiCacheConnector]:
    with connect(model, daemon) as made:
        yield made


@pytest.mark.parametrize("run", [bare, whole])
@pytest.mark.parametrize(("length", "served"), [(5, 0), (16, 15), (17, 16), (40, 32), (64, 63), (100, 96)])
def test_second_run_is_served_and_equal(connector, daemon, run, length, served) -> None:
    model = connector.model
    ids = prompt(length)
    want = expected(model, ids)
    cold = run(model, connector, ids, new=NEW)
    warm = run(model, connector, ids, new=NEW)
    assert agree(cold, want)
    assert agree(warm, want)
    assert (cold[2][0].recomputed, cold[2][0].tokens_l2) == (length, 0)
    assert (warm[2][0].recomputed, warm[2][0].tokens_l2) == (length - served, served)
    assert daemon.leases == {}


def test_every_layer_is_waited_for_in_order(model, connector, daemon) -> None:
    ids = prompt(40)
    connector.generate(ids)
    assert daemon.waits == []
    connector.generate(ids)
    assert daemon.waits == [0, 1, 2]


def test_l3_tokens_are_told_apart(model, connector, daemon) -> None:
    ids = prompt(40)
    connector.generate(ids)
    daemon.in_l3 = True
    stats = connector.generate(ids).stats[0]
    assert (stats.tokens_l2, stats.tokens_l3, stats.recomputed) == (0, 32, 8)


@pytest.mark.parametrize("run", [bare, whole])
def test_hit_that_ends_in_the_middle_of_the_prompt(model, connector, run) -> None:
    shared, tail = prompt(50), prompt(30, seed=7)
    run(model, connector, shared)
    ids = torch.cat([shared[:, :45], tail], dim=1)
    got = run(model, connector, ids)
    assert agree(got, expected(model, ids))
    assert got[2][0].tokens_l2 == 32


@pytest.mark.parametrize("run", [bare, whole])
def test_batch_with_different_hit_lengths(model, connector, run) -> None:
    first, second, third, short = prompt(70), prompt(35, 1), prompt(50, 2), prompt(4, 3)
    run(model, connector, first)
    run(model, connector, second[:, :20])
    ids, mask = padded(first, second, third, short)
    got = run(model, connector, ids, mask)
    assert agree(got, expected(model, ids, mask))
    served = [row.tokens_l2 for row in got[2]]
    if run is whole:  # each row keeps its own hit
        assert served == [64, 16, 0, 0]
    else:  # one column for all: the third row has nothing
        assert served == [20, 0, 0, 0]
    again = run(model, connector, ids, mask)
    assert agree(again, expected(model, ids, mask))
    if run is whole:
        assert [row.tokens_l2 for row in again[2]] == [64, 32, 48, 0]
    else:
        assert [row.tokens_l2 for row in again[2]] == [64, 29, 44, 0]


@pytest.mark.parametrize("l1_reuse", [True, False])
def test_rows_of_one_batch_compute_their_shared_prefix_once(model, daemon, l1_reuse) -> None:
    with connect(model, daemon, l1_reuse=l1_reuse) as connector:
        shared = prompt(50)
        prompts = [torch.cat([shared, prompt(n, seed)], dim=1) for seed, n in ((1, 9), (2, 20), (3, 5))]
        ids, mask = padded(*prompts, prompts[0], shared)
        for recomputed in ([59, 20, 5, 1, 1], [1, 1, 1, 1, 1] if l1_reuse else [11, 6, 5, 1, 1]):
            got = whole(model, connector, ids, mask)
            assert agree(got, expected(model, ids, mask))
            assert [row.recomputed for row in got[2]] == recomputed


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("late", [False, True])
def test_failed_load_of_a_row_that_others_copy_from(model, connector, daemon, layer, late) -> None:
    shared = prompt(50)
    prompts = [torch.cat([shared, prompt(n, seed)], dim=1) for seed, n in ((1, 9), (2, 20), (3, 5))]
    whole(model, connector, prompts[0])
    ids, mask = padded(*prompts)
    daemon.faults.late_at_layer, daemon.faults.fail_at_layer = (layer, None) if late else (None, layer)
    got = whole(model, connector, ids, mask)
    assert agree(got, expected(model, ids, mask))


@pytest.mark.parametrize("run", [bare, whole])
def test_conversation_hits_generated_tokens(model, connector, run) -> None:
    ids, previous = prompt(30), 1
    for turn in range(3):
        got = run(model, connector, ids)
        assert agree(got, expected(model, ids))
        assert got[2][0].tokens_l2 == (previous - 1) // 16 * 16
        previous = got[0].shape[1]
        ids = torch.cat([got[0], prompt(9, seed=10 + turn)], dim=1)


def test_conversation_goes_on_in_place_in_l1(model, daemon) -> None:
    with connect(model, daemon, l1_reuse=True) as connector:
        ids, previous = prompt(30), 1
        for turn in range(3):
            got = whole(model, connector, ids)
            assert agree(got, expected(model, ids))
            row = got[2][0]
            assert (row.tokens_l1, row.tokens_l2) == (previous - 1, 0)
            previous = got[0].shape[1]
            ids = torch.cat([got[0], prompt(9, seed=10 + turn)], dim=1)
        assert daemon.loaded_pages == 0
        stored = daemon.stored_pages
    with connect(model, daemon) as other:
        assert whole(model, other, ids)[2][0].tokens_l2 == stored * 16


@pytest.mark.parametrize("run", [bare, whole])
def test_shared_prefix_is_copied_within_l1(model, daemon, run) -> None:
    with connect(model, daemon, l1_reuse=True) as connector:
        shared = prompt(50)
        first, second = (torch.cat([shared, prompt(9, seed)], dim=1) for seed in (1, 2))
        run(model, connector, first)
        got = run(model, connector, second)
        assert agree(got, expected(model, second))
        assert (got[2][0].tokens_l1, daemon.loaded_pages) == (50, 0)
        again = run(model, connector, first)  # the first was not overwritten
        assert agree(again, expected(model, first))
        assert again[2][0].tokens_l1 == 58


def test_salted_requests_share_nothing_in_l1_or_l2(model, daemon) -> None:
    with connect(model, daemon, l1_reuse=True) as connector:
        ids = prompt(40)
        connector.generate(ids, salt="a")
        assert connector.generate(ids, salt="b").stats[0].recomputed == 40
        assert connector.generate(ids, lora="c").stats[0].recomputed == 40
        assert connector.generate(ids, salt="a").stats[0].tokens_l1 == 39


def test_a_corrupted_block_changes_the_output(model, connector, daemon) -> None:
    """The negative: the loaded bytes are what the model attends to, so equality above proves something."""
    ids = prompt(60)
    want = expected(model, ids)
    assert agree(whole(model, connector, ids), want)
    daemon.faults.corrupt = True
    got = whole(model, connector, ids)
    assert got[2][0].tokens_l2 == 48
    assert not agree(got, want)


@pytest.mark.parametrize("run", [bare, whole])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_failed_load_is_recomputed(connector, daemon, run, layer, late) -> None:
    model = connector.model
    ids = prompt(60)
    run(model, connector, ids)
    if late:
        daemon.faults.late_at_layer = layer
    else:
        daemon.faults.fail_at_layer = layer
    got = run(model, connector, ids)
    assert agree(got, expected(model, ids))
    assert (got[2][0].recomputed, got[2][0].tokens_l2) == (60, 0)
    counters = connector.counters
    assert (counters.loads_failed, counters.loads_late) == ((0, 1) if late else (1, 0))
    assert daemon.leases == {}


@pytest.mark.parametrize("run", [bare, whole])
@pytest.mark.parametrize("late", [False, True])
def test_failed_loads_in_a_batch(model, connector, daemon, run, late) -> None:
    first, second = prompt(70), prompt(35, 1)
    run(model, connector, first)
    run(model, connector, second)
    ids, mask = padded(first, second)
    daemon.faults.late_at_layer, daemon.faults.fail_at_layer = (1, None) if late else (None, 1)
    got = run(model, connector, ids, mask)
    assert agree(got, expected(model, ids, mask))
    assert [row.recomputed for row in got[2]] == [70, 35]


@pytest.mark.parametrize("run", [bare, whole])
@pytest.mark.parametrize("fault", ["refuse_loads", "refuse_stores", "absent"])
def test_faults_are_misses(model, connector, daemon, run, fault) -> None:
    ids = prompt(60)
    if fault == "refuse_loads":
        run(model, connector, ids)
    setattr(daemon.faults, fault, True)
    for _ in range(2):
        got = run(model, connector, ids)
        assert agree(got, expected(model, ids))
        assert got[2][0].recomputed == 60


@pytest.mark.parametrize("run", [bare, whole])
def test_more_tokens_than_declared(model, daemon, run) -> None:
    with connect(model, daemon) as connector:
        ids = prompt(40)
        connector.generate(ids)
        with connector.cache(ids, max_new_tokens=2) as cache:
            out = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out, expected(model, ids)[0])


def test_pool_smaller_than_the_prompt(model, daemon) -> None:
    with connect(model, daemon, pool_tokens=32) as connector:
        ids = prompt(60)
        got = bare(model, connector, ids)
        assert agree(got, expected(model, ids))
        assert connector.counters.without_columns == 1
        assert isinstance(connector.cache(ids), UncachedCache)


def test_full_pool_evicts_idle_sequences(model, daemon) -> None:
    with connect(model, daemon, pool_tokens=120, l1_reuse=True) as connector:
        prompts = [prompt(40, seed) for seed in range(4)]
        for ids in prompts * 2:
            assert agree(whole(model, connector, ids), expected(model, ids))
        assert connector.counters.without_columns == 0
        assert connector._context.pool.held() == 0


def test_beam_search_and_several_sequences_per_prompt(model, connector) -> None:
    ids = prompt(40)
    connector.generate(ids)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    want = model.generate(ids, **options)
    with connector.cache(ids, max_new_tokens=8) as cache:
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), want)


def test_prompt_lookup_decoding_crops(model, connector) -> None:
    ids = torch.cat([prompt(40), prompt(40)], dim=1)
    options = {"max_new_tokens": NEW, "do_sample": False, "prompt_lookup_num_tokens": 4}
    with connector.cache(ids, max_new_tokens=64) as cache:
        got = model.generate(ids, past_key_values=cache, **options)
        cache.finish(got)
    assert torch.equal(got, expected(model, ids)[0])
    assert connector.generate(got).stats[0].tokens_l2 == 80  # what was cropped is not in the store
    with connector.cache(ids) as cache, pytest.raises(ValueError, match="Assisted decoding"):
        model.generate(ids, past_key_values=cache, **options)


def test_deep_copy_is_an_ordinary_cache(model, connector) -> None:
    ids = prompt(40)
    connector.generate(ids)
    with connector.cache(ids, max_new_tokens=8) as cache:
        twin = copy.deepcopy(cache)
        out = model.generate(ids, past_key_values=twin, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, expected(model, ids)[0])


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
def test_other_masks_run_uncached(model, connector, mask) -> None:
    ids = prompt(4)
    cache = connector.cache(ids, torch.tensor([mask]))
    assert isinstance(cache, UncachedCache)
    assert connector.counters.unsupported_masks == 1


def test_row_stops_at_its_end_token(model, daemon) -> None:
    """After its end token a row is fed padding: that must not become part of its sequence."""
    with connect(model, daemon, l1_reuse=True) as connector:
        first, second = prompt(30), prompt(30, 1)
        ids = torch.cat([first, second])
        plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        stop = int(plain[0, 33])
        connector.generate(ids, max_new_tokens=NEW, eos_token_id=stop)
        kept = [r.tokens for idle in connector._context.pool._idle for r in idle.residents]
        assert kept[0].tolist() == plain[0, :34].tolist()


def test_dropped_cache_gives_its_columns_back(model, connector) -> None:
    cache = connector.cache(prompt(40), max_new_tokens=8)
    assert connector._context.pool.held() == 48
    del cache
    assert connector._context.pool.held() == 0


def test_changed_weights_are_noticed(model, daemon) -> None:
    other = copy.deepcopy(model)
    with connect(other, daemon) as connector:
        ids = prompt(40)
        connector.generate(ids)
        before = connector.spec
        with torch.no_grad():
            other.model.layers[1].mlp.up_proj.weight.mul_(1.5)
        got = whole(other, connector, ids)
        assert got[2][0].recomputed == 40
        assert connector.spec.revision != before.revision
        assert agree(got, expected(other, ids))
