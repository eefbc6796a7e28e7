"""``plan_step`` by itself: whatever the counts, nobody is cheated and something always progresses."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.scheduler.policy import Decision, Limits, Waiting, plan_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A running request as counts."""

    num_pending_tokens: int = 1
    num_draft_tokens: int = 0
    num_computed_tokens: int = 4
    num_slots: int = 8
    rank: tuple[int, int] = (0, 0)


FULL = Counts(num_computed_tokens=8)


def limits(max_num_batched_tokens: int = 16, max_num_seqs: int = 8) -> Limits:
    return Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, block_size=4)


def plan(running: list[Counts], waiting: list[Waiting], num_free: int, bounds: Limits, gain: int = 1) -> Decision:
    return plan_step(running, waiting, iter([gain] * len(running)), num_free_blocks=num_free, limits=bounds)


def test_decodes_come_before_chunks_and_chunks_fill_the_budget() -> None:
    running = [Counts(num_pending_tokens=20, num_slots=24), Counts(), Counts()]
    decision = plan(running, [Waiting(9, 3)], 8, limits())
    assert decision == Decision(grants=[14, 1, 1], num_preempted=0, admissions=[])


def test_what_chunks_leave_admits_from_the_queue() -> None:
    decision = plan([Counts()], [Waiting(9, 3), Waiting(9, 3), Waiting(1, 1)], 8, limits())
    assert decision == Decision(grants=[1], num_preempted=0, admissions=[9, 6])


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    assert plan([], [Waiting(9, 3), Waiting(1, 1)], 2, limits()).admissions == []


def test_seats_bound_admissions() -> None:
    assert plan([Counts()], [Waiting(1, 1)] * 5, 8, limits(max_num_seqs=3)).admissions == [1, 1]


def test_the_youngest_is_the_victim_and_nobody_is_admitted_then() -> None:
    decision = plan([FULL, Counts(), Counts()], [Waiting(1, 0)], 0, limits())
    assert decision == Decision(grants=[1, 1, 0], num_preempted=1, admissions=[])


def test_victims_fall_until_a_block_is_really_free() -> None:
    running = [FULL, Counts(), Counts()]
    decision = plan_step(running, [], iter([0, 2]), num_free_blocks=0, limits=limits())
    assert decision == Decision(grants=[1, 0, 0], num_preempted=2, admissions=[])


def test_the_youngest_stands_still_rather_than_lose_its_work() -> None:
    decision = plan([Counts(), FULL], [Waiting(1, 0)], 0, limits())
    assert decision == Decision(grants=[1, 0], num_preempted=0, admissions=[])


def test_a_stalled_decode_does_not_stop_an_older_chunk() -> None:
    running = [Counts(num_pending_tokens=4, num_slots=8), FULL]
    assert plan(running, [], 0, limits(max_num_batched_tokens=1)).grants == [1, 0]


@pytest.mark.parametrize(("num_free", "budget", "granted"), [(3, 16, 5), (2, 16, 4), (1, 16, 4), (2, 3, 2), (0, 16, 0)])
def test_drafts_take_no_block_and_no_token_from_those_behind(num_free: int, budget: int, granted: int) -> None:
    running = [Counts(num_draft_tokens=4, num_computed_tokens=8), FULL]
    decision = plan(running, [], num_free, limits(max_num_batched_tokens=budget), gain=0)
    assert decision.grants[0] == granted


running_counts = st.integers(1, 12).flatmap(
    lambda slots: st.builds(
        Counts,
        num_pending_tokens=st.sampled_from([1, 1, 1, 3]),
        num_draft_tokens=st.integers(0, 3),
        num_computed_tokens=st.integers(0, slots * 4),
        num_slots=st.just(slots * 4),
    ).filter(lambda c: c.num_pending_tokens == 1 or c.num_computed_tokens + c.num_pending_tokens <= c.num_slots)
)


class Reads:
    """An iterator that counts how far it was read."""

    def __init__(self, values: list[int]) -> None:
        self.values, self.num_read = values, 0

    def __iter__(self) -> Iterator[int]:
        for value in self.values:
            self.num_read += 1
            yield value


@given(
    running=st.lists(running_counts, max_size=6),
    waiting=st.lists(st.builds(Waiting, st.integers(1, 20), st.integers(0, 5)), max_size=5),
    gains=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    num_free=st.integers(0, 6),
    budget=st.integers(1, 12),
    max_num_seqs=st.integers(6, 8),
)
def test_any_decision_is_affordable_and_fair(
    running: list[Counts], waiting: list[Waiting], gains: list[int], num_free: int, budget: int, max_num_seqs: int
) -> None:
    releases = Reads(gains)
    decision = plan_step(running, waiting, releases, num_free_blocks=num_free, limits=limits(budget, max_num_seqs))
    num_kept = len(running) - decision.num_preempted
    assert sum(decision.grants) + sum(decision.admissions) <= budget
    assert len(running) + len(decision.admissions) <= max_num_seqs
    assert all(not grant for grant in decision.grants[num_kept:]), "a victim was granted"
    assert releases.num_read == decision.num_preempted
    needed = 0
    for request, grant in zip(running, decision.grants, strict=True):
        drafts = request.num_draft_tokens if request.num_pending_tokens == 1 else 0
        assert 0 <= grant <= request.num_pending_tokens + drafts
        needed += max(0, -(-(request.num_computed_tokens + grant - request.num_slots) // 4))
    needed += sum(request.num_blocks for request, _ in zip(waiting, decision.admissions, strict=False))
    assert needed <= num_free + sum(gains[: decision.num_preempted]), "more blocks than there are"
    stalled = [i for i in range(num_kept) if not decision.grants[i]]
    if decision.num_preempted or stalled:
        assert not decision.admissions
    if stalled and sum(decision.grants) < budget:
        assert stalled == [num_kept - 1], "only the last one left may stand still while there is budget"
    if num_kept > 1 or num_free:
        assert not running or any(decision.grants), "nothing progresses"
    if not running and waiting and waiting[0].num_blocks <= num_free:
        assert decision.admissions, "a head that fits was left waiting"
