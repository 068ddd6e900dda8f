"""Model, group, shard and layout specs: what adds up is accepted, what does not is named."""

import msgspec
import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.spec.group import GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout, check_layout
from hicache.spec.model import ModelSpec, RopeSpec, ShardSpec


def group(**changes: object) -> GroupSpec:
    base = GroupSpec("full", "full", (0, 1), kv_heads=3, head_dim=64, dtype="float32", block_tokens=16)
    return msgspec.structs.replace(base, **changes)


def model(**changes: object) -> ModelSpec:
    base = ModelSpec("m", "r1", (group(),), 16, RopeSpec("default", 10_000.0, 64))
    return msgspec.structs.replace(base, **changes)


def paged_layout(spec: GroupSpec, blocks: int = 8) -> L1Layout:
    size = spec.block_layer_bytes()
    offsets = tuple(i * blocks * size for i in range(len(spec.layers)))
    lay = GroupLayout(spec.name, offsets, blocks, size, (), size)
    return L1Layout(len(offsets) * blocks * size, (lay,))


def test_block_bytes_follow_the_formula() -> None:
    assert group().block_layer_bytes() == 2 * 16 * 3 * 64 * 4
    assert group().block_bytes() == 2 * group().block_layer_bytes()
    assert group(dtype="bfloat16").block_layer_bytes() * 2 == group().block_layer_bytes()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "name"),
        ({"layers": ()}, "layers"),
        ({"layers": (1, 0)}, "layers"),
        ({"layers": (0, 0)}, "layers"),
        ({"layers": (-1, 0)}, "layers"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"dtype": "float99"}, "dtype"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"window": 5}, "window"),
    ],
)
def test_a_bad_group_names_the_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(HiCacheError) as caught:
        group(**changes).check()
    assert caught.value.code is ErrorCode.BAD_SPEC
    assert field in caught.value.message


def test_a_latent_group_keeps_one_vector_per_token() -> None:
    latent = group(kind="latent", kv_heads=1, head_dim=576, dtype="bfloat16", block_tokens=16)
    latent.check()
    assert latent.block_layer_bytes() == 16 * 576 * 2
    with pytest.raises(HiCacheError, match="kv_heads must be 1 for latent, got 3"):
        group(kind="latent", kv_heads=3).check()


@pytest.mark.parametrize(("kind", "window"), [("sliding", 128), ("state", 0)])
def test_kinds_not_carried_yet_are_refused_with_a_remedy(kind: str, window: int) -> None:
    with pytest.raises(HiCacheError) as caught:
        group(kind=kind, window=window).check()
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": ""}, "name"),
        ({"revision": "x" * 600}, "revision"),
        ({"prefix_granularity": 0}, "prefix_granularity"),
        ({"groups": ()}, "groups"),
        ({"groups": (group(), group(name="b"))}, "more than one group"),
        ({"groups": (group(), group(layers=(2,)))}, "names must differ"),
        ({"prefix_granularity": 24}, "block_tokens 16"),
    ],
)
def test_a_bad_model_says_what_is_wrong(changes: dict[str, object], text: str) -> None:
    with pytest.raises(HiCacheError, match=text) as caught:
        model(**changes).check()
    assert caught.value.code is ErrorCode.BAD_SPEC


def test_a_model_may_mix_granularities() -> None:
    fine, coarse = group(name="fine", block_tokens=16), group(name="coarse", layers=(2,), block_tokens=128)
    model(groups=(fine, coarse), prefix_granularity=64).check()


def test_too_many_groups_or_layers_are_refused() -> None:
    with pytest.raises(HiCacheError, match="groups"):
        model().check(max_groups=0)
    with pytest.raises(HiCacheError, match="layers"):
        model().check(max_layers=1)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_a_shard_rank_stays_below_its_size(axis: str) -> None:
    ShardSpec(**{f"{axis}_rank": 1, f"{axis}_size": 2}).check()
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(HiCacheError, match=axis):
            ShardSpec(**{f"{axis}_rank": rank, f"{axis}_size": size}).check()


def test_fingerprint_sees_every_field() -> None:
    specs = [
        model(),
        model(name="n"),
        model(revision="r2"),
        model(groups=(group(dtype="float16"),)),
        model(groups=(group(kv_heads=1),)),
        model(groups=(group(layers=(0,)),)),
        model(groups=(group(block_tokens=8),)),
        model(prefix_granularity=32),
        model(rope=RopeSpec("default", 10_001.0, 64)),
        model(rope=RopeSpec("default", 10_000.0, 64, pairing="interleaved")),
    ]
    prints = {spec.fingerprint() for spec in specs}
    assert len(prints) == len(specs)
    assert all(len(p) == 32 for p in prints)


def test_fingerprints_stay_what_they_were() -> None:
    """What is on disk was stored under these: a change would orphan it."""
    assert model().fingerprint().hex() == "0c65c537ab8eca582bc712e6eb16cc02375b3c05d4ae2422c85b9be33e97642a"
    layout = paged_layout(group())
    assert layout.fingerprint().hex() == "1025e9daf1a4906196b93150980f75e2872f441ce4e6df85ddaa18d683b4427b"


def test_a_layout_that_fits_exactly_is_accepted() -> None:
    check_layout(model(), paged_layout(group()))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_offsets": (0,)}, "layer_offsets"),
        ({"blocks": 9}, "past pool_bytes"),
        ({"blocks": 0}, "blocks"),
        ({"blocks": -1}, "blocks"),
        ({"block_stride": 0}, "block_stride"),
        ({"block_stride": 1 << 60}, "block_stride"),
        ({"run_bytes": 4}, "axes"),
        ({"run_bytes": -24576}, "axes"),
        ({"layer_offsets": (-4, 0)}, "ends at"),
        ({"layer_offsets": (0, 1 << 40)}, "past pool_bytes"),
        ({"axes": (Axis(1 << 40, 0),)}, "axis"),
        ({"axes": (Axis(1, -8),)}, "axis"),
        ({"axes": (Axis(1, 0),) * 5}, "at most 4"),
    ],
)
def test_a_layout_that_lies_is_refused(changes: dict[str, object], text: str) -> None:
    good = paged_layout(group())
    bad = msgspec.structs.replace(good.groups[0], **changes)
    with pytest.raises(HiCacheError, match=text) as caught:
        check_layout(model(), L1Layout(good.pool_bytes, (bad,)))
    assert caught.value.code is ErrorCode.BAD_SPEC


def test_a_layout_must_name_the_models_groups_and_a_sane_pool() -> None:
    good = paged_layout(group())
    with pytest.raises(HiCacheError, match="differ from the model"):
        check_layout(model(), L1Layout(good.pool_bytes, ()))
    for size in (0, -1, 1 << 50):
        with pytest.raises(HiCacheError, match="pool_bytes"):
            check_layout(model(), L1Layout(size, good.groups))


def test_strided_starts_may_overlap_but_not_leave_the_pool() -> None:
    spec, tokens = group(layers=(0,)), 100
    row = spec.head_dim * 4
    head, kv = tokens * row, 3 * tokens * row
    lay = GroupLayout("full", (0,), tokens - 15, row, (Axis(2, kv), Axis(3, head)), 16 * row)
    check_layout(model(groups=(spec,)), L1Layout(2 * kv, (lay,)))
    with pytest.raises(HiCacheError, match="past pool_bytes"):
        check_layout(model(groups=(spec,)), L1Layout(2 * kv, (msgspec.structs.replace(lay, blocks=tokens - 14),)))


def test_layout_fingerprint_sees_byte_order_only() -> None:
    good = paged_layout(group())
    wide = paged_layout(group(), blocks=16)
    assert good.fingerprint() == wide.fingerprint()
    turned = msgspec.structs.replace(good.groups[0], order="kv,token,head,dim")
    assert L1Layout(good.pool_bytes, (turned,)).fingerprint() != good.fingerprint()


def cut_layout(spec: GroupSpec, blocks: int = 2, **changes: object) -> L1Layout:
    """Blocks of 128 tokens [head][token][K and V], cut into starts of 16 tokens."""
    row = 2 * spec.head_dim * 4
    head, block = 128 * row, spec.kv_heads * 128 * row
    lay = GroupLayout(
        spec.name,
        tuple(i * blocks * block for i in range(len(spec.layers))),
        blocks * 8,
        block,
        (Axis(spec.kv_heads, head),),
        16 * row,
        "head,token,kv,dim",
        starts_per_block=8,
        start_stride=16 * row,
    )
    return L1Layout(len(spec.layers) * blocks * block, (msgspec.structs.replace(lay, **changes),))


def test_blocks_may_be_cut_into_starts_that_reach_the_pools_last_byte() -> None:
    check_layout(model(), cut_layout(group()))
    short = msgspec.structs.replace(cut_layout(group()), pool_bytes=cut_layout(group()).pool_bytes - 1)
    with pytest.raises(HiCacheError, match="past pool_bytes"):
        check_layout(model(), short)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"starts_per_block": 0}, "multiple of starts_per_block"),
        ({"starts_per_block": 3}, "multiple of starts_per_block"),
        ({"start_stride": 0}, "less than block_stride"),
        ({"start_stride": 1 << 20}, "less than block_stride"),
        ({"starts_per_block": 1}, "start_stride must be 0"),
    ],
)
def test_a_cut_that_lies_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(HiCacheError, match=text) as caught:
        check_layout(model(), cut_layout(group(), **changes))
    assert caught.value.code is ErrorCode.BAD_SPEC


def test_how_a_pool_is_cut_does_not_change_the_fingerprint() -> None:
    whole = cut_layout(group(), starts_per_block=1, start_stride=0)
    assert cut_layout(group()).fingerprint() == whole.fingerprint()
