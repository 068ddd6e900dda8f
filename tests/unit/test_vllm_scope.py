"""From a vLLM request to what its KV depends on, and to what is not cached."""

import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hicache.protocol.messages import Scope
from hicache_client.connectors.vllm import scope as scoping
from hicache_client.connectors.vllm.scope import Adapters, NotYet, Scopes, Uncacheable
from tests.vllm_fakes import FakeFeature, FakeLora, FakePosition, FakeRequest

SAFETY_S = 20.0


def request(**changes: Any) -> FakeRequest:
    return FakeRequest("r", [1, 2, 3, 4], 3, **changes)


def settled(scopes: Scopes, asked: FakeRequest) -> Scope | Uncacheable:
    """The scope once the adapter has been read; the limit is a safety net."""
    end = time.monotonic() + SAFETY_S
    while isinstance(found := scopes.of(asked), NotYet):
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


def adapter(folder: Path, weights: bytes = b"w" * 100, config: bytes = b"{}") -> FakeLora:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_bytes(config)
    return FakeLora(folder.name, 1, str(folder))


def reason(found: object) -> str:
    assert isinstance(found, Uncacheable)
    return found.reason


# ---- salt and epoch -------------------------------------------------------------------------------------


def test_a_plain_request_has_the_empty_scope() -> None:
    assert Scopes().of(request()) == Scope()


def test_the_cache_salt_is_the_salt() -> None:
    assert Scopes().of(request(cache_salt="a")) == Scope(salt="a")


def test_after_a_reset_nothing_older_is_found_and_salts_still_differ() -> None:
    scopes = Scopes()
    before = {scopes.of(request(cache_salt=salt)) for salt in (None, "a", "b")}
    scopes.reset()
    after = {scopes.of(request(cache_salt=salt)) for salt in (None, "a", "b")}
    scopes.reset()
    again = {scopes.of(request(cache_salt=salt)) for salt in (None, "a", "b")}
    assert len(before | after | again) == 9


def test_two_engines_are_not_in_the_same_epoch_by_chance() -> None:
    one, two = Scopes(), Scopes()
    one.reset()
    two.reset()
    assert one.of(request()) != two.of(request())


def test_a_caller_can_not_choose_another_epoch_by_its_salt() -> None:
    scopes = Scopes(nonce=lambda: b"n" * 16)
    scopes.reset()
    inside = scopes.of(request(cache_salt="x"))
    fresh = Scopes()
    assert isinstance(inside, Scope)
    assert inside.salt.startswith("\0")
    assert fresh.of(request(cache_salt="x")) != inside


def test_a_salt_that_is_no_text_or_too_long_is_refused() -> None:
    assert "cache_salt" in reason(Scopes().of(request(cache_salt="\ud800")))
    assert "too long" in reason(Scopes().of(request(cache_salt="x" * 40_000)))


# ---- multimodal -----------------------------------------------------------------------------------------


def test_multimodal_inputs_count_with_position_kind_and_whole_identifier() -> None:
    def of(*features: FakeFeature) -> Scope | Uncacheable | NotYet:
        return Scopes().of(request(mm_features=features))

    one = FakeFeature("a" * 64, FakePosition(3))
    base = of(one)
    assert isinstance(base, Scope)
    ((position, digest),) = base.multimodal
    assert position == 3
    assert len(digest) == 32
    others = [
        of(FakeFeature("a" * 63 + "b", FakePosition(3))),  # the last of 64 characters
        of(FakeFeature("a" * 64, FakePosition(4))),
        of(FakeFeature("a" * 64, FakePosition(3), "video")),
        of(one, FakeFeature("c", FakePosition(9))),
        of(),
    ]
    assert len({base, *others}) == 6


def test_multimodal_inputs_are_ordered_by_position() -> None:
    one, two = FakeFeature("a", FakePosition(3)), FakeFeature("b", FakePosition(9))
    assert Scopes().of(request(mm_features=[two, one])) == Scopes().of(request(mm_features=[one, two]))


def test_an_input_without_identifier_is_refused() -> None:
    assert "identifier" in reason(Scopes().of(request(mm_features=[FakeFeature("", FakePosition(1))])))


def test_more_inputs_than_a_message_carries_are_refused() -> None:
    many = [FakeFeature(str(i), FakePosition(i)) for i in range(2000)]
    assert "too long" in reason(Scopes().of(request(mm_features=many)))


# ---- what is not cached ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompt_embeds": object()}, "embeddings"),
        ({"prompt_is_token_ids": [True, False]}, "mixes"),
        ({"resumable": True}, "streaming"),
    ],
)
def test_what_tokens_do_not_tell_is_refused_with_the_reason(changes: dict[str, Any], word: str) -> None:
    assert word in reason(Scopes().of(request(**changes)))


def test_a_pooling_request_without_tokens_is_refused() -> None:
    class NoTokens(FakeRequest):
        prompt_token_ids = None  # type: ignore[assignment]

    assert "no prompt tokens" in reason(Scopes().of(NoTokens("r", [], 0)))


# ---- LoRA -----------------------------------------------------------------------------------------------


def test_an_adapter_is_known_by_what_its_files_say(tmp_path: Path) -> None:
    base = settled(Scopes(), request(lora_request=adapter(tmp_path / "a")))
    assert isinstance(base, Scope)
    assert len(base.lora) == 64
    same = settled(Scopes(), request(lora_request=adapter(tmp_path / "elsewhere")))
    weights = settled(Scopes(), request(lora_request=adapter(tmp_path / "b", weights=b"v" * 100)))
    config = settled(Scopes(), request(lora_request=adapter(tmp_path / "c", config=b'{"r": 8}')))
    assert same == base
    assert len({base, weights, config, Scope()}) == 4


def test_bytes_moved_from_one_file_to_the_next_are_another_adapter(tmp_path: Path) -> None:
    digests = []
    for name, first, second in (("a", b"12", b"3"), ("b", b"1", b"23")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "x.bin").write_bytes(first)
        (folder / "y.bin").write_bytes(second)
        digests.append(scoping.digest_of(scoping.adapter_files(str(folder)), fused=False))
    assert digests[0] != digests[1]
    files = scoping.adapter_files(str(tmp_path / "a"))
    assert scoping.digest_of(files, fused=True) != digests[0]


def test_an_adapter_is_read_once_and_not_on_the_callers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    real, slow_disk = scoping.digest_of, threading.Event()

    def watched(files: list[Path], fused: bool) -> str:
        threads.append(threading.current_thread().name)
        assert slow_disk.wait(SAFETY_S)
        return real(files, fused)

    monkeypatch.setattr(scoping, "digest_of", watched)
    scopes, lora = Scopes(), adapter(tmp_path / "a")
    assert isinstance(scopes.of(request(lora_request=lora)), NotYet)
    slow_disk.set()
    for _ in range(3):
        assert isinstance(settled(scopes, request(lora_request=lora)), Scope)
    assert threads == ["hicache-adapter"]


def test_an_adapter_whose_files_changed_is_cached_no_more(tmp_path: Path) -> None:
    scopes, lora = Scopes(), adapter(tmp_path / "a")
    assert isinstance(settled(scopes, request(lora_request=lora)), Scope)
    adapter(tmp_path / "a", weights=b"longer" * 100)
    assert "changed" in reason(settled(scopes, request(lora_request=lora)))
    under_a_new_id = FakeLora(lora.lora_name, 2, lora.lora_path)
    assert isinstance(settled(scopes, request(lora_request=under_a_new_id)), Scope)


def test_an_adapter_that_can_not_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    hub = FakeLora("hub", 1, "some/where")
    assert "local folder" in reason(Scopes().of(request(lora_request=hub)))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty" in reason(Scopes().of(request(lora_request=FakeLora("e", 1, str(empty)))))
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "adapter_model.safetensors").mkdir()  # opens like a file that is gone
    assert "can't be read" in reason(settled(Scopes(), request(lora_request=FakeLora("b", 1, str(folder)))))


def test_an_adapter_loaded_in_place_is_refused(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "a")
    lora.load_inplace = True
    assert "in place" in reason(Scopes().of(request(lora_request=lora)))


def test_adapters_remembered_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoping, "ADAPTERS_REMEMBERED", 3)
    adapters, lora = Adapters(), adapter(tmp_path / "a")
    for number in range(1, 8):
        adapters.digest(FakeLora("a", number, lora.lora_path))
    assert len(adapters._known) == 3


# ---- no randomness of a process -------------------------------------------------------------------------


def test_scopes_are_the_same_in_every_process(tmp_path: Path) -> None:
    adapter(tmp_path / "a")
    code = (
        f"from hicache_client.connectors.vllm import scope as s; files = s.adapter_files({str(tmp_path / 'a')!r});"
        "print(s.identifier_digest('image', 'abc').hex(), s.digest_of(files, False))"
    )
    said = set()
    for seed in ("0", "1", "random"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        said.add(done.stdout)
    assert len(said) == 1
    digest = hashlib.blake2b(b"image\0abc", digest_size=32, person=b"hicache-mm").hexdigest()
    assert said.pop().startswith(digest)
