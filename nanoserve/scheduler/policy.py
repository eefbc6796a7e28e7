"""Who runs in the next step: a pure function of counts, with no block ids and no requests in it.

Invariant: grants come from the old end of the running order and victims from its young end, so the answer can be three
lists of counts and a victim can never be one already granted.

A request takes the blocks of all its known tokens when it is admitted. So a request in the middle of its prompt
competes for the token budget alone, and only a decoding one ever grows; that is why decodes may be settled first
without taking blocks away from an older prompt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol


class Running(Protocol):
    """The counts of an admitted request of ``rank`` (priority, arrival). Its blocks can hold ``num_slots`` tokens."""

    @property
    def rank(self) -> tuple[int, int]: ...
    @property
    def num_pending_tokens(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_slots(self) -> int: ...


class Waiting(NamedTuple):
    """The counts of a request that is not admitted: tokens to compute, and blocks that would leave the free list."""

    num_pending_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``grants``: tokens for each running request, oldest first (0: it waits). The last ``num_preempted`` go back.

    ``admissions``: tokens for each request taken from the head of the waiting queue, in order.
    """

    grants: Sequence[int]
    num_preempted: int
    admissions: Sequence[int]


def plan_step(
    running: Sequence[Running],
    waiting: Iterable[Waiting],
    releases: Iterable[int],
    *,
    num_free_blocks: int,
    limits: Limits,
    urgency: int | None = None,
) -> Decision:
    """Share one step's tokens and blocks.

    ``running`` is in order of (priority, arrival); ``waiting`` in that of its turns. ``releases``: the blocks that come
    free with each further victim, youngest first. Both iterables are read only as far as the decision needs.
    ``urgency``: the priority of the first of ``waiting``, where running requests of worse priority give way to it.
    """
    step = _Step(running, iter(releases), num_free_blocks, limits)
    queue = iter(waiting)
    if urgency is not None:
        queue = step.give_way(urgency, queue)
    step.grant_decodes()
    step.grant_chunks()
    step.admit(queue)
    return Decision(grants=step.grants, num_preempted=len(running) - step.num_kept, admissions=step.admissions)


class _Step:
    """What is left to give while one step is planned: token budget, free blocks, and running requests not preempted."""

    __slots__ = ("admissions", "budget", "grants", "limits", "num_free_blocks", "num_kept", "pending", "releases",
                 "running", "starved")  # fmt: skip

    def __init__(self, running: Sequence[Running], releases: Iterator[int], num_free_blocks: int, limits: Limits):
        self.running = running
        self.releases = releases
        self.num_free_blocks = num_free_blocks
        self.limits = limits
        self.budget = limits.max_num_batched_tokens
        self.pending = [request.num_pending_tokens for request in running]
        self.grants = [0] * len(running)
        self.admissions: list[int] = []
        self.num_kept = len(running)
        self.starved = False

    def give_way(self, urgency: int, waiting: Iterator[Waiting]) -> Iterator[Waiting]:
        """Send the youngest requests of worse priority back, if that lets the head of the queue in.

        It comes in with the next step, since its hits may be in the victims' blocks; at once where nobody else is left.
        """
        if (head := next(waiting, None)) is None:  # its blocks are still on their way from the disk
            return waiting
        num_kept, num_free_blocks, given = self.num_kept, self.num_free_blocks, list[int]()
        while not (fits := num_kept < self.limits.max_num_seqs and head.num_blocks <= num_free_blocks):
            if not num_kept or self.running[num_kept - 1].rank[0] <= urgency:
                break
            given.append(next(self.releases))
            num_free_blocks += given[-1]
            num_kept -= 1
        if fits:
            self.num_kept, self.num_free_blocks = num_kept, num_free_blocks
        else:
            self.releases = chain(given, self.releases)
        return chain([head], waiting)

    def grant_decodes(self) -> None:
        """One token for every decode, oldest first, and its drafts where they take nothing from those behind it."""
        num_behind = self.pending.count(1)
        for index, request in enumerate(self.running):
            if index >= self.num_kept or self.budget <= 0:
                return
            if self.pending[index] > 1:
                continue
            num_behind -= 1
            num_open_slots = request.num_slots - request.num_computed_tokens
            if num_open_slots > 0 and not request.num_draft_tokens:
                num_tokens = 1
            else:
                num_tokens = self._grow(index, num_open_slots, request.num_draft_tokens, num_behind)
            self.grants[index] = num_tokens
            self.budget -= num_tokens

    def _grow(self, index: int, num_open_slots: int, num_drafts: int, num_behind: int) -> int:
        """Tokens for a decode that needs a block or has drafts; younger requests are preempted for its first token."""
        block_size = self.limits.block_size
        while num_open_slots < 1 and self.num_free_blocks < 1 and self.num_kept > index + 1:
            self.num_kept -= 1
            self.num_free_blocks += next(self.releases)
        num_own_blocks = int(num_open_slots < 1 <= self.num_free_blocks)
        num_blocks = max(num_own_blocks, self.num_free_blocks - num_behind)
        wanted = 1 + min(num_drafts, max(0, self.budget - num_behind - 1))
        num_tokens = min(wanted, num_open_slots + num_blocks * block_size)
        self.num_free_blocks -= max(0, -(-(num_tokens - num_open_slots) // block_size))
        self.starved = self.starved or num_tokens < 1
        return num_tokens

    def grant_chunks(self) -> None:
        """What the decodes left of the budget, to requests in the middle of their prompts, oldest first."""
        for index in range(self.num_kept):
            if self.budget <= 0:
                return
            if self.pending[index] > 1:
                self.grants[index] = min(self.pending[index], self.budget)
                self.budget -= self.grants[index]

    def admit(self, waiting: Iterator[Waiting]) -> None:
        """Admit from the head while seats, budget and blocks last; a head that does not fit holds back all behind it.

        Nobody is admitted in a step that took blocks from a running request, or that could not serve one; but where
        all gave way to the head, it is, alone.
        """
        num_seats = self.limits.max_num_seqs - self.num_kept
        if self.num_kept < len(self.running):
            num_seats = 0 if self.num_kept else 1
        while len(self.admissions) < num_seats and self.budget > 0 and not self.starved:
            request = next(waiting, None)
            if request is None or request.num_blocks > self.num_free_blocks:
                return
            self.num_free_blocks -= request.num_blocks
            self.admissions.append(min(request.num_pending_tokens, self.budget))
            self.budget -= self.admissions[-1]
