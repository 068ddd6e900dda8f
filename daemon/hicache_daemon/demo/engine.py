"""An engine process of the demo: a model, one request per line on stdin, one answer per line on stdout.

    → {"op": "ask", "question": text, "mode": "hicache" | "off" | "own", "salt": text, "new_tokens": n}
    ← {"tokens": [ids], "ttft_ms": ms, "prompt_tokens": n, "tokens_l1": …, "tokens_l2": …, "tokens_l3": …,
       "recomputed": n, "text": text}

`off` is the model alone. `own` is transformers' own prefix reuse: a DynamicCache of the system prompt, kept in
this process and cropped back after each request. Ends at the end of stdin.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hicache_daemon.demo.model import load
from hicache_daemon.demo.processes import die_with_parent
from hicache_daemon.demo.prompts import SYSTEM

if TYPE_CHECKING:
    import torch

POOL_TOKENS = 4096


class Engine:
    """Model, tokenizer and connector of one process."""

    def __init__(self, model_folder: Path, runtime_dir: Path) -> None:
        from hicache_client.connectors.transformers import HiCacheConnector

        self.model, self.tokenizer = load(model_folder)
        # L1 reuse is off: the demo shows what comes from the daemon, not what this process still had.
        self.connector = HiCacheConnector(
            self.model, runtime_dir=runtime_dir, pool_tokens=POOL_TOKENS, l1_reuse=False
        )
        self.system_tokens = self._prompt("a")[1]
        self._own: Any = None
        self._off(self._prompt("warm up")[0][:, :64], 2)  # the first forward of a process is slower

    def _prompt(self, question: str) -> "tuple[torch.Tensor, int]":
        """Token ids [1, n] of system prompt and question, and how many of them are the system prompt's."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        encode = self.tokenizer.apply_chat_template
        shared = encode(messages[:1], return_tensors="pt", return_dict=True)["input_ids"]
        ids = encode(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        return ids, int(shared.shape[1])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request."""
        ids, _ = self._prompt(request["question"])
        new_tokens = int(request["new_tokens"])
        mode = request["mode"]
        if mode == "hicache":
            result = self.connector.generate(ids, max_new_tokens=new_tokens, salt=request["salt"])
            tokens, stats = result.sequences, asdict(result.stats[0])
        else:
            tokens, ttft_ms, reused = (self._own_reuse if mode == "own" else self._off)(ids, new_tokens)
            n = ids.shape[1]
            stats = {"prompt_tokens": n, "tokens_l1": reused, "tokens_l2": 0, "tokens_l3": 0}
            stats |= {"recomputed": n - reused, "ttft_ms": ttft_ms}
        new = tokens[0, ids.shape[1] :].tolist()
        return stats | {"tokens": new, "text": self.tokenizer.decode(new, skip_special_tokens=True)}

    def _off(self, ids: "torch.Tensor", new_tokens: int) -> "tuple[torch.Tensor, float, int]":
        return (*self._timed(ids, new_tokens, None), 0)

    def _own_reuse(self, ids: "torch.Tensor", new_tokens: int) -> "tuple[torch.Tensor, float, int]":
        import torch
        from transformers import DynamicCache

        if self._own is None:
            self._own = DynamicCache(config=self.model.config)
            with torch.no_grad():
                self.model(ids[:, : self.system_tokens], past_key_values=self._own, use_cache=True, logits_to_keep=1)
        tokens, ttft_ms = self._timed(ids, new_tokens, self._own)
        self._own.crop(self.system_tokens - self._own.get_seq_length())
        return tokens, ttft_ms, self.system_tokens

    def _timed(self, ids: "torch.Tensor", new_tokens: int, cache: Any) -> "tuple[torch.Tensor, float]":
        """Greedy generation and the milliseconds to its first token."""
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        times: list[float] = []

        class Watch(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
                times.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool)

        start = time.perf_counter()
        tokens = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([Watch()]),
        )
        return tokens, (times[0] - start) * 1e3


def serve(engine: Engine, requests: TextIO, answers: TextIO) -> None:
    """Answer until the end of `requests`."""
    for line in requests:
        print(json.dumps(engine.ask(json.loads(line))), file=answers, flush=True)


def main(model_folder: str, runtime_dir: str) -> int:
    """Entry point of the process. What libraries print goes to stderr."""
    die_with_parent()
    answers, sys.stdout = sys.stdout, sys.stderr
    start = time.perf_counter()
    engine = Engine(Path(model_folder), Path(runtime_dir))
    ready = {
        "system_tokens": engine.system_tokens,
        "load_s": time.perf_counter() - start,
        "connected": engine.connector.connected,
    }
    print(json.dumps(ready), file=answers, flush=True)
    serve(engine, sys.stdin, answers)
    engine.connector.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
