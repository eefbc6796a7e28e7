"""Loads on a target that only counts."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from nanoserve.core.errors import UnavailableError
from nanoserve.observe.load import closed_loop, open_loop
from nanoserve.observe.workloads import Item

ITEMS = [Item((1, index), 1 + index % 3) for index in range(12)]


class Counter:
    """Gives the tokens one by one; the item with this second token fails, or stops one short."""

    def __init__(self, *, fails_at: int = -1, stops_at: int = -1) -> None:
        self.fails_at, self.stops_at = fails_at, stops_at
        self.num_open = self.most_open = 0
        self.asked: list[Item] = []

    async def answer(self, item: Item) -> AsyncIterator[int]:
        self.asked.append(item)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        for _ in range(item.num_output_tokens - (item.prompt_token_ids[1] == self.stops_at)):
            await asyncio.sleep(0)
            yield 1
        self.num_open -= 1
        if item.prompt_token_ids[1] == self.fails_at:
            raise UnavailableError("It broke.")


def lengths(outcomes: Sequence[object]) -> list[int]:
    return [len(outcome.trace.token_times_s) for outcome in outcomes if outcome.trace]  # type: ignore[attr-defined]


async def test_a_closed_loop_has_so_many_clients() -> None:
    target = Counter()
    outcomes = await closed_loop(target, ITEMS, 3)
    assert (target.most_open, target.asked[0]) == (3, ITEMS[0])
    assert [outcome.item for outcome in outcomes] == ITEMS
    assert lengths(outcomes) == [item.num_output_tokens for item in ITEMS]


async def test_an_open_loop_waits_for_nobody() -> None:
    target = Counter()
    outcomes = await open_loop(target, ITEMS, [0.0] * len(ITEMS))
    assert target.most_open == len(ITEMS)
    assert [outcome.item for outcome in outcomes] == ITEMS


async def test_time_runs_from_when_a_request_was_due() -> None:
    late, punctual = await open_loop(Counter(), ITEMS[:2], [-5.0, 0.0])
    assert late.trace is not None
    assert punctual.trace is not None
    assert late.trace.ttft_s >= 5.0
    assert punctual.trace.ttft_s < 5.0


async def test_failures_are_told_and_do_not_end_the_run() -> None:
    outcomes = await closed_loop(Counter(fails_at=4, stops_at=7), ITEMS, 2)
    assert [index for index, outcome in enumerate(outcomes) if outcome.trace is None] == [4, 7]
    assert outcomes[4].error == "It broke."
    assert outcomes[7].error == "Asked for 2 tokens, got 1."
