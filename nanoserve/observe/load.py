"""Puts a workload on a target: as fast as a number of clients go (closed loop), or as requests are due (open loop).

In an open loop a request's time runs from when it was due: a target that makes others wait is not let off for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from nanoserve.core.errors import NanoserveError
from nanoserve.observe.latency import Trace
from nanoserve.observe.workloads import Item


class Target(Protocol):
    """Whoever answers."""

    def answer(self, item: Item) -> AsyncIterator[int]:
        """The number of new tokens, each time that some come.

        Raises:
            NanoserveError: the request failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an item: its trace, or in one sentence why there is none."""

    item: Item
    trace: Trace | None
    error: str = ""


async def closed_loop(target: Target, items: Sequence[Item], num_clients: int) -> list[Outcome]:
    """Each client sends the next item when its last one is done; outcomes in the items' order."""
    outcomes: dict[int, Outcome] = {}
    left = iter(enumerate(items))

    async def client() -> None:
        for index, item in left:
            outcomes[index] = await _ask(target, item, time.perf_counter())

    await asyncio.gather(*(client() for _ in range(min(num_clients, len(items)))))
    return [outcomes[index] for index in range(len(items))]


async def open_loop(target: Target, items: Sequence[Item], due_s: Sequence[float]) -> list[Outcome]:
    """Each item is sent ``due_s`` seconds after the start, whatever became of the others."""
    start_s = time.perf_counter()

    async def send(item: Item, due_s: float) -> Outcome:
        await asyncio.sleep(start_s + due_s - time.perf_counter())
        return await _ask(target, item, start_s + due_s)

    return list(await asyncio.gather(*(send(item, due) for item, due in zip(items, due_s, strict=True))))


async def _ask(target: Target, item: Item, sent_s: float) -> Outcome:
    times: list[float] = []
    try:
        async for num_tokens in target.answer(item):
            times += [time.perf_counter()] * num_tokens
    except NanoserveError as error:
        return Outcome(item, None, error.message)
    if len(times) != item.num_output_tokens:
        return Outcome(item, None, f"Asked for {item.num_output_tokens} tokens, got {len(times)}.")
    return Outcome(item, Trace(sent_s=sent_s, token_times_s=tuple(times)))
