"""Random conversations, and what a model alone answers: the measure for everything else."""

import random
from typing import Any

from engine import Engine

VOCABULARY = (10, 4000)


def words(rng: random.Random, count: int) -> list[int]:
    """So many random token ids."""
    return [rng.randrange(*VOCABULARY) for _ in range(count)]


def lengths(rng: random.Random, block: int, longest: int) -> int:
    """A length that likes to lie at the edge of a block, or one off it."""
    if longest >= block and rng.random() < 0.6:
        return max(1, min(longest, rng.randrange(1, longest // block + 1) * block + rng.choice((-1, 0, 1))))
    return rng.randrange(1, longest + 1)


class Conversations:
    """Several that go on turn by turn; some share a beginning, some part from each other inside a block."""

    def __init__(self, seed: int, block: int, longest: int) -> None:
        self.rng = random.Random(seed)
        self.block, self.longest = block, longest
        self.systems = [words(self.rng, lengths(self.rng, block, longest // 3)) for _ in range(3)]
        self.open: list[list[int]] = []
        self.count = 0

    def round(self, size: int) -> list[dict[str, Any]]:
        """The next requests. Arrivals and aborts are part of them, so that every engine meets the same."""
        rng, requests = self.rng, []
        for _ in range(size):
            if self.open and rng.random() < 0.65:
                prompt = self.open.pop(rng.randrange(len(self.open)))
                if rng.random() < 0.2:  # goes another way from somewhere
                    prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
            else:
                prompt = list(rng.choice(self.systems)) if rng.random() < 0.8 else []
            room = self.longest - len(prompt)
            prompt = prompt + words(rng, lengths(rng, self.block, max(1, room // 2))) if room > 1 else prompt
            self.count += 1
            requests.append(
                {
                    "id": f"r{self.count}",
                    "tokens": prompt,
                    "max_tokens": rng.randrange(1, 24),
                    "arrive": rng.randrange(0, 12),
                    "abort": rng.randrange(1, 30) if rng.random() < 0.12 else None,
                }
            )
        return requests

    def answered(self, requests: list[dict[str, Any]], outputs: dict[str, Any]) -> None:
        """Take the answers of the model alone into the conversations."""
        for request in requests:
            output = outputs.get(request["id"])
            if output is None or request["abort"] is not None:
                continue
            text = request["tokens"] + output["tokens"][0]
            if len(text) < self.longest - 8:
                self.open.append(text)
        del self.open[:-12]


def alone(model: str, seed: int, rounds: int, size: int, **arguments: Any) -> list[tuple[list[dict[str, Any]], Any]]:
    """Rounds of requests with the answers of vLLM without hicache and without a prefix cache of its own."""
    longest = arguments.pop("longest", 700)
    talk = Conversations(seed, arguments.get("block_size", 32), longest)
    answered = []
    with Engine(model, None, enable_prefix_caching=False, **arguments) as engine:
        for _ in range(rounds):
            requests = talk.round(size)
            outputs = engine.run(requests)
            talk.answered(requests, outputs)
            answered.append((requests, outputs))
    return answered
