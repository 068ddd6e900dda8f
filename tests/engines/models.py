"""The models of these tests, made on first use: SmolLM2 from its GGUF, tiny ones of each family, random weights."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "engines" / "models"
_COMMON = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GQA = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
# family → (config class, model class, dtype of the weights, what differs from the common part)
TINY: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", "float32", {"num_hidden_layers": 4, **_GQA}),
    "mla": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        "bfloat16",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        "float32",
        {
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
    "mistral-swa": (
        "MistralConfig",
        "MistralForCausalLM",
        "float32",
        {"num_hidden_layers": 4, "sliding_window": 128, **_GQA},
    ),
    "qwen3next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        "bfloat16",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}

_MAKE_TINY = """
import json, sys, torch, transformers
config, model, dtype, fields, target = json.loads(sys.argv[1])
torch.manual_seed(0)
made = getattr(transformers, model)(getattr(transformers, config)(**fields))
made.to(getattr(torch, dtype)).save_pretrained(target)
"""


_CONVERT = """
import sys, pathlib
from hicache_daemon.demo.model import convert, find_gguf
convert(find_gguf(), pathlib.Path(sys.argv[1]))
"""


def path_of(name: str) -> Path:
    """Folder of "smollm2" or of a tiny family; made if it is not there yet."""
    target = FOLDER / name
    if (target / "config.json").exists():
        return target
    scratch = FOLDER / f".{name}.{os.getpid()}"
    scratch.parent.mkdir(parents=True, exist_ok=True)
    if name == "smollm2":
        _convert_smollm2(scratch)
    else:
        config, model, dtype, changes = TINY[name]
        argument = json.dumps([config, model, dtype, _COMMON | changes, str(scratch)])
        _run([sys.executable, "-c", _MAKE_TINY, argument])
        for file in path_of("smollm2").glob("tokenizer*"):  # for the HTTP server; the vocabulary is larger
            shutil.copy(file, scratch)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    return target


def _convert_smollm2(target: Path) -> None:
    _run([sys.executable, "-c", _CONVERT, str(target)])


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
