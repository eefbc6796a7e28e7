"""Many small seeded workloads, each request against its answer alone: cheaper than the state machine, so wider."""

import random

import pytest

from nanoserve.core.request import GenerateRequest
from tests.engine.driving import Driver, make_config, make_request


def workload(rng: random.Random) -> tuple[Driver, list[tuple[int, GenerateRequest]]]:
    """A tight pool, and requests (with their arrival steps) that share beginnings."""
    block_size, num_blocks = rng.randint(1, 4), rng.randint(4, 12)
    num_host_blocks, num_disk_blocks = rng.choice([(0, 0), (20, 0), (4, 40), (4, 40), (2, 3)])
    loss, losing = rng.choice([0.0, 0.3]), random.Random(1)
    driver = Driver(
        make_config(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=rng.randint(2, 6),
            max_num_batched_tokens=rng.choice([2, 5, 50]),
            enable_prefix_caching=rng.random() < 0.8,
            num_host_blocks=num_host_blocks,
            num_disk_blocks=num_disk_blocks,
        ),
        loses=lambda copy: losing.random() < loss,
    )
    num_slots = block_size * num_blocks
    stems = [[rng.randint(0, 2) for _ in range(num_slots)] for _ in range(3)]
    arrivals: list[tuple[int, GenerateRequest]] = []
    for i in range(rng.randint(4, 10)):
        prompt = [*rng.choice(stems)[: rng.randint(0, num_slots - 2)], rng.randint(0, 2)]
        request = make_request(
            f"r{i}",
            prompt,
            max_tokens=rng.randint(1, num_slots),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            priority=rng.choice([0, 0, 1]),
        )
        arrivals.append((rng.randint(0, 30), request))
    return driver, sorted(arrivals, key=lambda arrival: arrival[0])


@pytest.mark.parametrize("first_seed", range(0, 400, 50))
def test_every_request_gets_its_own_answer(first_seed: int) -> None:
    num_preemptions = num_cached = num_brought_up = num_fetched = num_lost = 0
    for seed in range(first_seed, first_seed + 50):
        driver, arrivals = workload(random.Random(seed))
        for step in range(31):
            for _, request in (arrival for arrival in arrivals if arrival[0] == step):
                driver.add(request)
            driver.step()
        driver.run()
        stats = driver.core.scheduler.stats()
        num_preemptions += stats.num_preemptions_total
        num_cached += stats.num_cached_tokens_total
        num_brought_up += stats.num_brought_up_blocks_total
        num_fetched += stats.num_fetched_blocks_total
        num_lost += stats.num_lost_blocks_total
    assert num_preemptions > 50, "too roomy to mean anything"
    assert num_cached > 50, "too little shared to mean anything"
    assert num_brought_up > 20, "the tiers hardly mattered"
    assert num_fetched and num_lost, "the disk hardly mattered"  # noqa: PT018
