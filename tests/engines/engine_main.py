"""An engine in a process of its own, driven step by step over its standard streams: one JSON object per line.

The requests of a `run` arrive, and are aborted, at given steps, so that two engines meet the same schedule.
"""

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
    from vllm import LLM  # noqa: PLC0415 - after the streams are ours

    begun = time.monotonic()
    engine = Engine(LLM(**arguments))
    print(json.dumps({"ready": True, "seconds": round(time.monotonic() - begun, 2)}), file=told)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "exit":
            break
        print(json.dumps(getattr(engine, command.pop("op"))(**command)), file=told)
    engine.engine.engine_core.shutdown()
    print(json.dumps({}), file=told)
    os._exit(0)  # what is left is seconds of taking modules down


class Engine:
    """vLLM in this process: scheduler, worker and model."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.preemptions = 0
        self.counted: dict[str, int] = {}
        self.times: dict[str, dict[str, int]] = {}
        core = getattr(self.engine.engine_core, "engine_core", None)
        self.scheduler = None if core is None else core.scheduler
        if self.scheduler is not None:
            preempt = self.scheduler._preempt_request

            def counted(*args: Any, **kwargs: Any) -> None:
                self.preemptions += 1
                preempt(*args, **kwargs)

            self.scheduler._preempt_request = counted
            make_stats = self.scheduler.make_stats

            def listened(*args: Any, **kwargs: Any) -> Any:
                made = make_stats(*args, **kwargs)
                if made is not None and made.kv_connector_stats:
                    self._note(made.kv_connector_stats)
                return made

            self.scheduler.make_stats = listened

    def run(self, requests: list[dict[str, Any]], step_s: float = 0.0) -> dict[str, Any]:
        """Answer all requests; aborted ones have what they had until then."""
        outputs: dict[str, Any] = {}
        said: dict[str, dict[int, Any]] = {}
        waiting, step = sorted(requests, key=lambda each: each.get("arrive", 0)), 0
        aborts = {each["id"]: each["abort"] for each in requests if each.get("abort") is not None}
        while waiting or self.engine.has_unfinished_requests():
            while waiting and waiting[0].get("arrive", 0) <= step:
                self._add(waiting.pop(0))
            for name, at in list(aborts.items()):
                if at <= step:
                    del aborts[name]
                    self.engine.abort_request([name])
            for output in self.engine.step():
                texts = said.setdefault(output.request_id, {})
                texts.update({each.index: each for each in output.outputs})
                output.outputs = [texts[index] for index in sorted(texts)]  # some versions tell one at a time
                outputs[output.request_id] = _plain(output)
            step += 1
            time.sleep(step_s)
        return {"outputs": outputs, "preemptions": self.preemptions, "steps": step}

    def _add(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams  # noqa: PLC0415

        several = request.get("n", 1) > 1
        parameters = SamplingParams(
            temperature=1.0 if several else 0.0,  # several greedy ones are refused by some versions
            top_k=1,
            max_tokens=request.get("max_tokens", 8),
            logprobs=2,
            n=request.get("n", 1),
            prompt_logprobs=request.get("prompt_logprobs"),
            ignore_eos=True,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        lora = None
        if request.get("lora"):
            from vllm.lora.request import LoRARequest  # noqa: PLC0415

            lora = LoRARequest(*request["lora"])
        self.engine.add_request(
            request["id"], prompt, parameters, lora_request=lora, priority=request.get("priority", 0)
        )

    def reset(self, connector: bool = False) -> dict[str, Any]:
        """Forget vLLM's own prefix cache, and what the connector may serve if `connector`."""
        deadline = time.monotonic() + 20
        while not self.llm.reset_prefix_cache(reset_connector=connector) and time.monotonic() < deadline:
            self.engine.step()  # blocks of finished requests that are still read
            time.sleep(0.01)
        return {"idle": self.idle()}

    def settle(self, seconds: float = 5.0) -> dict[str, Any]:
        """Step until nothing of finished requests is left."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.idle():
            self.engine.step()
            time.sleep(0.005)
        return {"idle": self.idle()}

    def spoil(self, layer: int | None) -> dict[str, Any]:
        """From now on this layer's blocks are zeroed when a load of it is over, as if it had never been restored."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        connector = get_kv_transfer_group()
        worker = connector._worker
        if not hasattr(self, "pristine"):
            self.pristine = worker._ended

        def ended(load: Any) -> None:
            self.pristine(load)

        def spoiling(name: str) -> None:
            type(worker).wait_for_layer_load(worker, name)
            if worker._place.layers.get(name) == layer:
                for load in worker._sync:
                    self._zero(name, load)

        def receiving(load: Any) -> None:
            for name, at in worker._place.layers.items():
                if at == layer and not load.plan.sync:
                    self._zero(name, load)
            self.pristine(load)

        worker.wait_for_layer_load = spoiling
        worker._ended = receiving if layer is not None else ended
        return {}

    def _zero(self, name: str, load: Any) -> None:
        cache = self.engine.vllm_config.compilation_config.static_forward_context[name].kv_cache
        tensor = cache[0] if isinstance(cache, list | tuple) else cache
        tensor[list(load.plan.blocks[0])] = 0

    def arm(self, phase: str, pid: int, number: int) -> dict[str, Any]:
        """At this point of a request's life, once: signal `number` to process `pid`. See phases.py."""
        from phases import Blow  # noqa: PLC0415
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        scheduler = None if self.scheduler is None else self.scheduler.connector._scheduler
        self.blow = Blow(scheduler, get_kv_transfer_group()._worker, phase, pid, number)
        return {}

    def disarm(self) -> dict[str, Any]:
        """The point is taken out; how often it struck."""
        self.blow.lift()
        return {"struck": self.blow.struck}

    def idle(self) -> bool:
        """No request is left, and every block but the null block is free."""
        if self.scheduler is None:
            return True
        pool = self.scheduler.kv_cache_manager.block_pool
        return not self.scheduler.requests and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def _note(self, payload: dict[str, Any]) -> None:
        for name, n in payload["counts"].items():
            self.counted[name] = self.counted.get(name, 0) + n
        for name, histogram in payload["times"].items():
            mine = self.times.setdefault(name, {})
            for bucket, n in histogram.items():
                mine[str(bucket)] = mine.get(str(bucket), 0) + n

    def stats(self) -> dict[str, Any]:
        """What the connector told vLLM since the last call, both sides summed."""
        counted, self.counted = self.counted, {}
        return counted


def _plain(output: Any) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "tokens": [list(each.token_ids) for each in output.outputs],
        "logprobs": [[entry[token].logprob for token, entry in zip(first.token_ids, first.logprobs, strict=True)]],
        "gaps": [_gap(entry) for entry in first.logprobs],
        "prompt_logprobs": None
        if output.prompt_logprobs is None
        else [
            None if entry is None else sorted(each.logprob for each in entry.values())
            for entry in output.prompt_logprobs
        ],
        "cached": output.num_cached_tokens,
        "finished": output.finished,
    }


def _gap(entry: Any) -> float:
    """How far the best token is ahead of the next."""
    best = sorted((each.logprob for each in entry.values()), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


if __name__ == "__main__":
    main()
