"""Whose turn it is: waiting requests by priority, then by who has been served least for its weight, then by arrival.

The rule is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): every
tenant has a counter of the tokens it was served, and the next place goes to the smallest one. A tenant that had nothing
waiting is lifted to the others' level first, so that idleness is no credit. Between two tenants that always have
something waiting, the counters never drift apart by more than the largest request and what the running ones still
generate: a flood of one delays another by a bounded number of tokens, however long the flood's queue is.

Counters decide the order only. Nobody is held back while there is room, so no capacity is wasted.
"""

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Indexable
from typing import Protocol

from nanoserve.scheduler.ranked import RankedSequences
from nanoserve.scheduler.sequence import Sequence, Share

OUTPUT_PRICE = 2.0
"""A generated token against a computed prompt token, as in the paper; a cached prompt token is free."""


class Claim(Protocol):
    """A waiting request. ``rank``: (priority, arrival). ``num_cached_tokens`` is -1 until it was admitted once."""

    @property
    def rank(self) -> tuple[int, int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...


def fair_order(lines: Indexable[tuple[Share, Indexable[Claim]]]) -> Iterator[tuple[int, int]]:
    """The turns of these lines (each not empty, in order of rank) as (line, place in it), best first.

    Each turn counts as served when the next one is chosen, so several admissions of one step are shared as well. A
    request that ran before and was preempted has paid already, and comes before the others of its priority.
    """
    turns = [_turn(share.used, claims[0], line, 0) for line, (share, claims) in enumerate(lines)]
    heapq.heapify(turns)
    while turns:
        _, _, _, line, place, used = turns[0]
        yield line, place
        share, claims = lines[line]
        claim = claims[place]
        used += claim.num_prompt_tokens / share.weight if claim.num_cached_tokens < 0 else 0.0
        if place + 1 < len(claims):
            heapq.heapreplace(turns, _turn(used, claims[place + 1], line, place + 1))
        else:
            heapq.heappop(turns)


def _turn(used: float, claim: Claim, line: int, place: int) -> tuple[int, float, int, int, int, float]:
    priority, arrival = claim.rank
    return priority, used if claim.num_cached_tokens < 0 else -1.0, arrival, line, place, used


class FairQueue:
    """The waiting queue of one engine and its tenants' accounts. Tenants are those that an operator set up: few."""

    def __init__(self) -> None:
        self._lines: dict[str, RankedSequences] = {}
        self._shares: dict[str, Share] = {}
        self._level = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they are to be admitted; not to be changed meanwhile."""
        lines = [(self._shares[tenant], line.items) for tenant, line in self._lines.items()]
        if len(lines) == 1:
            yield from lines[0][1]
            return
        for line, place in fair_order(lines):
            yield lines[line][1][place]

    @property
    def urgency(self) -> int | None:
        """The best priority that waits."""
        return min((line.items[0].rank[0] for line in self._lines.values()), default=None)

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        share = self._shares.setdefault(tenant, sequence.share)
        if (line := self._lines.get(tenant)) is None:
            line = self._lines[tenant] = RankedSequences()
            share.used = max(share.used, self._level)
        share.weight = sequence.request.weight
        sequence.share = share
        line.add(sequence)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        line = self._lines[tenant]
        line.remove(sequence)
        self._length -= 1
        if not len(line):
            del self._lines[tenant]

    def charge_prompt(self, sequence: Sequence) -> None:
        """A request gets its first place in a batch: its tenant pays for what is not cached."""
        share = sequence.share
        self._level = max(self._level, share.used)
        share.used += (sequence.num_prompt_tokens - sequence.num_cached_tokens) / share.weight
