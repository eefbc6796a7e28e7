"""Workloads as frozen, seeded values, so that two engines, or two commits, are given the same tokens."""

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


WORKLOADS = {
    # The comparison: 16 requests of mixed lengths.
    "mixed16": Workload(num_requests=16, input_tokens=(16, 256), output_tokens=(16, 128)),
    "single": Workload(num_requests=1, input_tokens=(128, 128), output_tokens=(128, 128)),
    "batch16": Workload(num_requests=16, input_tokens=(128, 128), output_tokens=(128, 128)),
    "shared16": Workload(num_requests=16, input_tokens=(16, 16), output_tokens=(16, 16), num_shared_tokens=512),
    "chat64": Workload(num_requests=64, input_tokens=(8, 200), output_tokens=(8, 100)),
    "tiny": Workload(num_requests=4, input_tokens=(4, 12), output_tokens=(4, 8)),
}
