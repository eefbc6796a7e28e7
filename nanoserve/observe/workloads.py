"""Workloads as frozen, seeded values, so that two engines, or two commits, are given the same tokens."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One request: ``prompt_token_ids`` in, exactly ``num_output_tokens`` out (EOS is ignored)."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests with lengths drawn evenly from closed ranges; the first ``num_shared_tokens`` ids are common to all."""

    num_requests: int
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    num_shared_tokens: int = 0
    seed: int = 0
    max_token_id: int = 500

    def items(self) -> list[Item]:
        rng = random.Random(self.seed)
        shared = self._ids(rng, self.num_shared_tokens)
        return [
            Item(shared + self._ids(rng, rng.randint(*self.input_tokens)), rng.randint(*self.output_tokens))
            for _ in range(self.num_requests)
        ]

    def _ids(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, self.max_token_id) for _ in range(count))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start at which requests come, a Poisson process of ``rate`` a second; all at 0 for inf."""
    rng, now_s, times = random.Random(f"arrivals {seed}"), 0.0, list[float]()
    for _ in range(count):
        now_s += rng.expovariate(rate) if math.isfinite(rate) else 0.0
        times.append(now_s)
    return times
