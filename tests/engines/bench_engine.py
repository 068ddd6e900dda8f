"""One vLLM for bench_vllm.py, in a process of its own and under any interpreter that has vLLM. Nothing of ours is
needed unless the connector's times are asked for.

Over its standard streams, one JSON object a line: first the arguments of `LLM`, and as
`import_first` modules that are to be there before it, then commands.
"""

import copy
import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Build the engine that the first line describes, then obey."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is not ours
    arguments = json.loads(sys.stdin.readline())
    from vllm import LLM, __version__  # noqa: PLC0415 - after the streams are ours

    for name in arguments.pop("import_first", []):
        importlib.import_module(name)
    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM looks into all modules, and falls over this one's objects
    engine = Engine(LLM(**arguments))
    print(json.dumps({"version": __version__}), file=told)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "exit":
            break
        print(json.dumps(getattr(engine, command.pop("op"))(**command)), file=told)
    engine.llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # what is left is seconds of taking modules down


class Engine:
    """vLLM in this process: scheduler, worker and model."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.stats: list[dict[str, Any]] = []
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        make_stats = scheduler.make_stats

        def listened(*args: Any, **kwargs: Any) -> Any:
            made = make_stats(*args, **kwargs)
            if made is not None and made.kv_connector_stats:
                self.stats.append(copy.deepcopy(made.kv_connector_stats))  # vLLM adds the next ones to it
            return made

        scheduler.make_stats = listened

    def touch(self) -> dict[str, Any]:
        """Write to all of the KV cache once, as in an engine that has run for a while: fresh memory is slow."""
        layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        for layer in layers:
            cache = layer.kv_cache
            (cache[0] if isinstance(cache, list | tuple) else cache).zero_()
        return {"layers": len(layers)}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Greedy answers, the seconds until all were there, and how many tokens of each prompt were not computed."""
        from vllm import SamplingParams  # noqa: PLC0415

        asked: Any = [{"prompt_token_ids": tokens} for tokens in prompts]
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        begin = time.perf_counter()
        outputs = self.llm.generate(asked, parameters, use_tqdm=False)
        seconds = time.perf_counter() - begin
        answers = [list(each.outputs[0].token_ids) for each in outputs]
        return {"seconds": seconds, "tokens": answers, "cached": [each.num_cached_tokens for each in outputs]}

    def reset(self, wait_s: float) -> dict[str, Any]:
        """Forget vLLM's own prefix cache once what a connector still reads is free, and nothing came for `wait_s`."""
        deadline = time.monotonic() + 20
        while not self.llm.reset_prefix_cache() and time.monotonic() < deadline:
            self._step()
        quiet = time.monotonic() + wait_s
        while time.monotonic() < quiet:
            self._step()
        return {"reset": self.llm.reset_prefix_cache()}

    def _step(self) -> None:
        self.llm.llm_engine.step()  # without requests: a connector's transfers are seen to have ended
        time.sleep(0.01)

    def times(self) -> dict[str, Any]:
        """What the hicache connector counted since the start: [p50, p99] of its times in seconds, and its counts."""
        from hicache_client.connectors.vllm.stats import HiCacheStats, quantile_s  # noqa: PLC0415

        total = HiCacheStats()
        for each in self.stats:
            total.aggregate(HiCacheStats(each))
        quantiles = {name: [quantile_s(histogram, q) for q in (0.5, 0.99)] for name, histogram in total.times.items()}
        return {"quantiles": quantiles, "counts": total.counts}


if __name__ == "__main__":
    main()
