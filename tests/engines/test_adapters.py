"""LoRA adapters: KV that an adapter made is for that adapter alone, whatever it is called."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import EXACT, Engine, compare_one

from tests.daemon_harness import DaemonProcess

PROMPT = [(i * 7919) % 3900 + 50 for i in range(330)]
HIDDEN, HEADS_OUT, KV_OUT, LAYERS, RANK = 256, 256, 64, 4, 8  # of models.TINY["llama"]
ARGUMENTS: dict[str, Any] = {"block_size": 32, "enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def adapter(folder: Path, seed: int) -> Path:
    """Random weights, large enough to change what the model says."""
    import torch  # noqa: PLC0415 - only where adapters are made
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, out in (("q_proj", HEADS_OUT), ("k_proj", KV_OUT), ("v_proj", KV_OUT)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            tensors[f"{base}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    found = {name: adapter(root / name, seed) for seed, name in enumerate(("one", "two"))}
    found["copy"] = root / "copy"
    shutil.copytree(found["one"], found["copy"])
    return found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """(without hicache, with it)"""
    with (
        DaemonProcess(tmp_path_factory.mktemp("daemon"), ["l2.size=128MiB"]) as daemon,
        Engine("llama", None, enable_prefix_caching=False, **ARGUMENTS) as alone,
        Engine("llama", {"runtime_dir": str(daemon.runtime_dir)}, **ARGUMENTS) as shared,
    ):
        yield alone, shared


def ask(engines: tuple[Engine, Engine], lora: tuple[str, int, Path] | None) -> dict[str, Any]:
    """The answer with the cache on, which is the one without it. vLLM's own prefix cache is forgotten before."""
    alone, shared = engines
    request: dict[str, Any] = {"id": "l", "tokens": PROMPT}
    if lora is not None:
        request["lora"] = [lora[0], lora[1], str(lora[2])]
    shared.ask("settle")
    shared.ask("reset")
    expected, got = alone.run([request])["l"], shared.run([request])["l"]
    compare_one(EXACT, expected, got, str(lora))
    return got


def test_adapters_do_not_share_and_each_hits_its_own(
    engines: tuple[Engine, Engine], adapters: dict[str, Path]
) -> None:
    whole = len(PROMPT) - 1
    ways = {"bare": None, "one": ("one", 1, adapters["one"]), "two": ("two", 2, adapters["two"])}
    cold = {name: ask(engines, lora) for name, lora in ways.items()}
    assert {name: each["cached"] for name, each in cold.items()} == {"bare": 0, "one": 0, "two": 0}
    assert len({tuple(each["tokens"][0]) for each in cold.values()}) == 3, (
        "adapters that change nothing prove nothing"
    )
    warm = {name: ask(engines, lora) for name, lora in ways.items()}
    assert {name: each["cached"] for name, each in warm.items()} == dict.fromkeys(ways, whole)


def test_an_adapter_is_what_its_files_say(engines: tuple[Engine, Engine], adapters: dict[str, Path]) -> None:
    """The same weights under another name, number and path are the same; other weights under a known name are not."""
    one = ask(engines, ("one", 1, adapters["one"]))
    same = ask(engines, ("another", 3, adapters["copy"]))
    assert same["cached"] == len(PROMPT) - 1
    assert same["tokens"] == one["tokens"]
    other = ask(engines, ("one", 4, adapters["two"]))
    assert other["tokens"] == ask(engines, ("two", 2, adapters["two"]))["tokens"] != one["tokens"]
