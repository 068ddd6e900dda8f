"""Identity: nothing that changes what a KV block means may leave namespace and page keys unchanged."""

import hashlib
import itertools
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from hicache.base.ids import Fingerprint, NamespaceId
from hicache.keys.chain import KeyChain
from hicache.keys.namespace import namespace_id
from hicache.protocol.messages import Scope
from hicache.spec.group import GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, RopeSpec, ShardSpec

SECRET = bytes(range(32))
GROUP = GroupSpec("full", "full", (0, 1, 2), kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)
MODEL = ModelSpec("smol", "rev-1", (GROUP,), 16, RopeSpec("default", 10000.0, 64))
PLACE = GroupLayout("full", (0, 4096, 8192), 64, 128, (Axis(2, 100), Axis(3, 10), Axis(16, 1)), 128)
LAYOUT = L1Layout(1 << 20, (PLACE,))
SHARD = ShardSpec()
SCOPE = Scope()
IMAGE, OTHER_IMAGE = b"\x01" * 32, b"\x01" * 31 + b"\x02"  # equal but for the last byte
TOKENS = np.arange(64, dtype="<i4").tobytes()


def ns(
    model: ModelSpec = MODEL,
    layout: L1Layout = LAYOUT,
    shard: ShardSpec = SHARD,
    scope: Scope = SCOPE,
    tenant: str = "default",
) -> NamespaceId:
    return namespace_id(SECRET, tenant, model, layout.fingerprint(), shard=shard, scope=scope)


def with_model(**changes: object) -> NamespaceId:
    return ns(model=msgspec.structs.replace(MODEL, **changes))


def with_group(**changes: object) -> NamespaceId:
    return with_model(groups=(msgspec.structs.replace(GROUP, **changes),))


def with_rope(**changes: object) -> NamespaceId:
    return with_model(rope=msgspec.structs.replace(MODEL.rope, **changes))


def with_place(**changes: object) -> NamespaceId:
    return ns(layout=L1Layout(1 << 20, (msgspec.structs.replace(PLACE, **changes),)))


def matrix() -> dict[str, NamespaceId]:
    """One namespace per way in which two requests may differ."""
    shards = {
        f"{axis}_{what}": ns(
            shard=ShardSpec(**{f"{axis}_size": 2 + (what == "size"), f"{axis}_rank": what == "rank"})
        )
        for axis in ("tp", "pp", "cp")
        for what in ("first of 2", "rank", "size")
    }
    images = {
        "image": ((5, IMAGE),),
        "image digest": ((5, OTHER_IMAGE),),
        "image position": ((6, IMAGE),),
        "image twice": ((5, IMAGE), (6, IMAGE)),
        "images in order": ((5, IMAGE), (6, OTHER_IMAGE)),
        "images exchanged": ((5, OTHER_IMAGE), (6, IMAGE)),
    }
    return {
        "base": ns(),
        "tenant": ns(tenant="other"),
        "tenant, empty": ns(tenant=""),
        "salt": ns(scope=Scope(salt="x")),
        "lora": ns(scope=Scope(lora="x")),
        "salt and lora": ns(scope=Scope(salt="x", lora="x")),
        "salt next to tenant": ns(tenant="defaul", scope=Scope(salt="t")),
        "name": with_model(name="smoller"),
        "revision": with_model(revision="rev-2"),
        "page size": with_model(prefix_granularity=32),
        "dtype": with_group(dtype="float16"),
        "dtype of one byte": with_group(dtype="float8_e4m3fn"),
        "dtype of one byte, other format": with_group(dtype="float8_e5m2"),
        "heads": with_group(kv_heads=6),
        "head dim": with_group(head_dim=32),
        "layers": with_group(layers=(0, 1, 3)),
        "block size": with_group(block_tokens=8),
        "rope base": with_rope(base=500000.0),
        "rope kind": with_rope(kind="linear"),
        "rope pairing": with_rope(pairing="interleaved"),
        "rope scaling": with_rope(scaling='{"factor":2.0}'),
        "attention scaling": with_rope(attention_scaling=1.5),
        "layout order": with_place(order="kv,token,head,dim"),
        "layout axes": with_place(axes=(Axis(2, 100), Axis(16, 1), Axis(3, 10))),
        "layout run": with_place(axes=(Axis(2, 100), Axis(3, 10)), run_bytes=2048),
        **shards,
        **{name: ns(scope=Scope(multimodal=content)) for name, content in images.items()},
    }


def test_no_two_entries_of_the_key_matrix_share_a_namespace_or_a_page() -> None:
    namespaces = matrix()
    assert len(namespaces) == 25 + 9 + 6
    assert {len(each) for each in namespaces.values()} == {32}
    chain = KeyChain(SECRET, 16)
    pages = {name: chain.keys(each, TOKENS) for name, each in namespaces.items()}
    for (one, mine), (other, theirs) in itertools.combinations(pages.items(), 2):
        assert namespaces[one] != namespaces[other], f"{one} hits {other}"
        assert not set(mine) & set(theirs), f"{one} hits {other}"


def test_where_a_pool_lies_does_not_matter() -> None:
    assert with_place(layer_offsets=(64, 128, 192), blocks=7, block_stride=256) == ns()


def test_another_secret_gives_other_ids_and_keys() -> None:
    secret = bytes(32)
    assert namespace_id(secret, "default", MODEL, LAYOUT.fingerprint(), shard=SHARD, scope=SCOPE) != ns()
    assert KeyChain(secret, 16).keys(ns(), TOKENS)[0] != KeyChain(SECRET, 16).keys(ns(), TOKENS)[0]


PRINT_KEYS = """
import sys
sys.path.insert(0, {here!r})
from test_keys import matrix, KeyChain, SECRET, TOKENS
for name, namespace in matrix().items():
    print(name, namespace.hex(), KeyChain(SECRET, 16).keys(namespace, TOKENS)[-1].hex())
"""


def test_pythons_hash_seed_changes_nothing() -> None:
    code = PRINT_KEYS.format(here=os.path.dirname(os.path.abspath(__file__)))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    expected = [
        f"{name} {namespace.hex()} {KeyChain(SECRET, 16).keys(namespace, TOKENS)[-1].hex()}"
        for name, namespace in matrix().items()
    ]
    assert outputs.pop().splitlines() == expected


def test_ids_and_keys_are_those_of_earlier_releases() -> None:
    """What lies on disk is found by these bytes: a change here orphans every record ever written."""
    namespace = ns(scope=Scope(salt="s", lora="l", multimodal=((5, IMAGE),)), tenant="t")
    assert namespace.hex() == "50d3b2b84daaf6a8bc056fdffae3cfa5d5e552823e3b9d5be555181ed4e6798c"
    assert (
        KeyChain(SECRET, 16).keys(namespace, TOKENS)[-1].hex()
        == "d4095eca0cb9b84ccc0cff60567fba8b6a8583708b3fb91a5c4a422dd952ddb3"
    )


def test_the_chain_is_what_its_docstring_says() -> None:
    previous, expected = bytes(ns()), []
    for page in range(4):
        data = previous + TOKENS[page * 64 : page * 64 + 64]
        previous = hashlib.blake2b(data, key=SECRET, digest_size=32, person=b"hicache-page-1").digest()
        expected.append(previous)
    chain = KeyChain(SECRET, 16)
    assert chain.keys(ns(), TOKENS) == expected
    assert list(chain.walk(ns(), TOKENS)) == expected
    assert chain.keys(expected[1], TOKENS, first_page=2) == expected[2:]
    assert list(chain.walk(expected[1], TOKENS, first_page=2)) == expected[2:]


@pytest.mark.parametrize(("count", "pages"), [(0, 0), (15, 0), (16, 1), (31, 1), (64, 4)])
def test_tokens_beyond_the_last_full_page_are_not_in_any_key(count: int, pages: int) -> None:
    chain = KeyChain(SECRET, 16)
    assert chain.keys(ns(), TOKENS[: count * 4]) == chain.keys(ns(), TOKENS)[:pages]
    assert list(chain.walk(ns(), TOKENS[: count * 4])) == chain.keys(ns(), TOKENS)[:pages]


def test_a_page_key_names_everything_before_the_page() -> None:
    changed = bytearray(TOKENS)
    changed[17 * 4] ^= 1  # token 17, in page 1
    chain = KeyChain(SECRET, 16)
    same = [a == b for a, b in zip(chain.keys(ns(), TOKENS), chain.keys(ns(), bytes(changed)), strict=True)]
    assert same == [True, False, False, False]


def test_walking_computes_no_more_keys_than_asked_for() -> None:
    walk = KeyChain(SECRET, 16).walk(ns(), TOKENS)
    assert [next(walk), next(walk)] == KeyChain(SECRET, 16).keys(ns(), TOKENS)[:2]


@pytest.mark.parametrize("length", [0, 31, 33])
def test_secrets_and_keys_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="cluster secret must have 32 bytes"):
        KeyChain(bytes(length), 16)
    with pytest.raises(ValueError, match="cluster secret must have 32 bytes"):
        namespace_id(bytes(length), "t", MODEL, Fingerprint(bytes(32)), shard=SHARD, scope=SCOPE)
    with pytest.raises(ValueError, match="previous key must have 32 bytes"):
        KeyChain(SECRET, 16).keys(bytes(length), TOKENS)
    with pytest.raises(ValueError, match="previous key must have 32 bytes"):
        next(KeyChain(SECRET, 16).walk(bytes(length), TOKENS))


def test_page_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="page_tokens must be positive"):
        KeyChain(SECRET, 0)
