"""Random requests, one after the other, over three connectors and a daemon that is too small and restarts.

Lengths around page edges, batches with different hits, conversations that go on, full L1 pools, an L2 that holds a
fraction so that L3 serves: whatever happened before, tokens and logits are those of the model alone.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)

from hicache_client.connectors.transformers import HiCacheConnector  # noqa: E402
from tests.daemon_harness import DaemonProcess  # noqa: E402
from tests.transformers_world import agree, bare, expected, padded, prompt, tiny_llama, whole  # noqa: E402

REQUESTS = 100
MOST_TOKENS = 220
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49)


class Prompts:
    """Prompts that share prefixes, and conversations that go on where an answer ended, or before."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._openings = [prompt(rng.choice((16, 32, 47, 48, 49, 100)), seed) for seed in range(6)]
        self._said: list[torch.Tensor] = []

    def next(self) -> torch.Tensor:
        rng = self._rng
        if self._said and rng.random() < 0.4:
            known = rng.choice(self._said)
            known = known[:, : rng.choice((known.shape[1], rng.randint(1, known.shape[1])))]
        else:
            known = rng.choice(self._openings)
            known = known[:, : rng.choice((known.shape[1], *EDGES))]
        more = prompt(rng.choice(EDGES), seed=rng.randint(0, 30))
        return torch.cat([known, more], 1)[:, :MOST_TOKENS]

    def heard(self, sequence: torch.Tensor) -> None:
        self._said = [*self._said[-11:], sequence]


def batches(rng: random.Random, prompts: Prompts) -> Iterator[list[torch.Tensor]]:
    for _ in range(REQUESTS):
        rows = [prompts.next() for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]
        if rng.random() < 0.3:  # rows that are prefixes of one another
            rows = [rows[0], *(rows[0][:, : rng.randint(1, rows[0].shape[1])] for _ in rows[1:])]
        yield rows


@pytest.mark.parametrize(("seed", "policy"), [(1, "write_through"), (2, "write_back")])
def test_whatever_came_before_the_output_is_that_of_the_model_alone(tmp_path: Path, seed: int, policy: str) -> None:
    rng, model = random.Random(seed), tiny_llama()
    prompts, served = Prompts(rng), 0
    with DaemonProcess(tmp_path, ["l2.size=1MiB", f"l3.write_policy={policy}"], l3=True) as daemon:
        connectors = [
            HiCacheConnector(model, runtime_dir=daemon.runtime_dir, pool_tokens=columns, l1_reuse=reuse)
            for columns, reuse in ((600, True), (1024, False), (260, True))
        ]
        for number, rows in enumerate(batches(rng, prompts)):
            ids, mask = padded(*rows)
            new, connector, run = rng.choice((1, 3, 8, 20)), rng.choice(connectors), rng.choice((bare, whole, whole))
            got = run(model, connector, ids, mask, new)
            context = f"request {number} of seed {seed}: {[row.shape[1] for row in rows]} + {new}, {got[2]}"
            assert agree(got, expected(model, ids, mask, new)), context
            served += sum(row.prompt_tokens - row.recomputed for row in got[2])
            chosen = rng.randrange(len(rows))
            prompts.heard(got[0][chosen : chosen + 1, int((mask[chosen] == 0).sum()) :])
            if rng.random() < 0.04:
                (daemon.stop if rng.random() < 0.5 else daemon.kill)()
                daemon.restart()
        for connector in connectors:
            connector.close()
    assert served > 0
