"""Fair shares: whatever one tenant piles up, another's request waits for a bounded number of tokens."""

from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.core.errors import QueueFullError
from nanoserve.scheduler.admission import Backlog, has_room
from nanoserve.scheduler.fairness import FairQueue, fair_order
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.sequence import Sequence, Share, root_node
from tests.engine.driving import Driver, make_config, make_request


class Job(NamedTuple):
    rank: tuple[int, int]
    num_prompt_tokens: int
    num_cached_tokens: int = -1


sizes = st.lists(st.integers(1, 100), min_size=1, max_size=20)


def lines_of(queues: list[list[int]], used: list[float]) -> list[tuple[Share, list[Job]]]:
    arrivals = count()
    return [(Share(used=u), [Job((0, next(arrivals)), size) for size in q]) for q, u in zip(queues, used, strict=True)]


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_every_turn_comes_once_and_each_line_keeps_its_order(queues: list[list[int]], data: st.DataObject) -> None:
    used = [data.draw(st.floats(0, 500)) for _ in queues]
    turns = list(fair_order(lines_of(queues, used)))
    assert len(turns) == sum(map(len, queues))
    for line, queue in enumerate(queues):
        assert [place for other, place in turns if other == line] == list(range(len(queue)))


@given(sizes, sizes, st.sampled_from([1.0, 2.0, 5.0]))
def test_while_two_lines_last_their_service_differs_by_no_more_than_one_request(
    first: list[int], second: list[int], weight: float
) -> None:
    lines = lines_of([first, second], [0.0, 0.0])
    lines[1][0].weight = weight
    served = [0.0, 0.0]
    most = max(*first, *second)
    for line, place in fair_order(lines):
        share, jobs = lines[line]
        served[line] += jobs[place].num_prompt_tokens / share.weight
        if place + 1 == len(jobs):
            return
        assert abs(served[0] - served[1]) <= most


def test_a_better_priority_comes_first_whoever_asks_and_one_that_ran_before_comes_before_its_equals() -> None:
    rich, poor = Share(used=900.0), Share(used=0.0)
    fresh, resumed = Job((0, 7), 10), Job((0, 9), 10, num_cached_tokens=0)
    lines = [(rich, [resumed]), (poor, [fresh]), (Share(used=999.0), [Job((-1, 12), 10)])]
    assert [line for line, _ in fair_order(lines)] == [2, 0, 1]


def test_idleness_is_no_credit() -> None:
    """The newcomer takes turns with the other from now on; it does not get back all that it never asked for."""
    queue, arrivals = FairQueue(), count()

    def wait(tenant: str) -> Sequence:
        request = make_request(f"r{next(arrivals)}", 10, tenant=tenant)
        sequence = Sequence(request, rank=(0, next(arrivals)), max_length=20, root=root_node())
        queue.add(sequence)
        return sequence

    def admit() -> str:
        sequence = next(iter(queue))
        queue.remove(sequence)
        sequence.num_cached_tokens = 0
        queue.charge_prompt(sequence)
        return sequence.request.tenant

    for _ in range(80):
        wait("old")
    assert [admit() for _ in range(50)] == ["old"] * 50
    for _ in range(20):
        wait("new")
    turns = "".join(admit()[0] for _ in range(20))
    assert "nnn" not in turns
    assert "ooo" not in turns


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_flood_does_not_starve_another_tenant(weight: float) -> None:
    """400 requests wait before the guest's twelve; of the tokens served while both wait, it gets its weight's part."""
    driver = Driver(make_config(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64), clock=lambda: 0.0)
    for i in range(400):
        driver.add(make_request(f"flood{i}", [i % 3, i % 2, 1, 2], tenant="flood"))
    for _ in range(10):
        driver.step()
    for i in range(12):
        driver.add(make_request(f"guest{i}", [2, i % 3, i % 2, 1], tenant="guest", weight=weight))
    num_done_before = sum(answer.finish_reason is not None for answer in driver.answers.values())
    while any(driver.answers[f"guest{i}"].finish_reason is None for i in range(12)):
        driver.step()
    num_done = sum(answer.finish_reason is not None for answer in driver.answers.values()) - num_done_before - 12
    assert 12 / weight - 4 <= num_done <= 12 / weight + 8
    driver.run()


def test_generated_tokens_count_too() -> None:
    """One tenant asks for long answers, one for short ones: the tokens are shared, not the requests."""
    driver = Driver(make_config(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64), clock=lambda: 0.0)
    for i in range(60):
        driver.add(make_request(f"long{i}", [i % 3, 1], tenant="long", max_tokens=20))
        driver.add(make_request(f"short{i}", [2, i % 3], tenant="short", max_tokens=4))
    while any(driver.answers[f"short{i}"].finish_reason is None for i in range(40)):
        driver.step()
    tokens = {t: sum(len(driver.answers[f"{t}{i}"].token_ids) for i in range(60)) for t in ("long", "short")}
    assert tokens["long"] / tokens["short"] == pytest.approx(1, abs=0.35)
    driver.run()


def test_batch_work_gives_its_seats_to_an_online_request_and_goes_on_behind_it() -> None:
    driver = Driver(make_config(num_blocks=32, max_num_seqs=2, max_num_batched_tokens=64))
    for i in range(3):
        driver.add(make_request(f"batch{i}", [i, 1, 2], max_tokens=40, priority=100))
    driver.step()
    driver.add(make_request("online", [1, 1, 2], max_tokens=2))
    for _ in range(3):
        driver.step()
    assert driver.answers["online"].finish_reason is not None
    assert driver.core.scheduler.stats().num_preemptions_total == 1
    driver.run()


def test_nobody_gives_way_where_that_would_not_let_the_head_in() -> None:
    """The pool is held by an online request; sending the small batch one back would help nobody."""
    driver = Driver(make_config(num_blocks=8, max_num_batched_tokens=64))
    driver.add(make_request("online", 20, max_tokens=8))
    driver.add(make_request("batch", 3, max_tokens=4, priority=100))
    driver.step()
    driver.add(make_request("large", 16, max_tokens=1))
    driver.step()
    assert driver.core.scheduler.stats().num_preemptions_total == 0
    driver.run()


def test_a_lone_batch_request_gives_way_in_one_step() -> None:
    """Its step was once empty: it had lost its seat, and the other was to come in with the next."""
    driver = Driver(make_config(num_blocks=4, max_num_seqs=1, max_num_batched_tokens=64))
    driver.add(make_request("batch", [0] * 7, max_tokens=8, priority=1))
    driver.step()
    driver.add(make_request("online", [0] * 7, max_tokens=1))
    driver.step()
    assert driver.answers["online"].finish_reason is not None
    driver.run()


def test_who_takes_a_seat_does_not_count_on_what_its_last_holder_would_have_computed() -> None:
    """The batch request is in the middle of the prompt that both have; its next chunk is never computed."""
    driver = Driver(make_config(num_blocks=16, max_num_seqs=1, max_num_batched_tokens=6))
    driver.add(make_request("batch", [i % 3 for i in range(20)], max_tokens=4, priority=1))
    driver.step()
    driver.add(make_request("online", [i % 3 for i in range(20)], max_tokens=3))
    driver.step()
    assert driver.core.scheduler.stats().num_preemptions_total == 1
    driver.run()
    assert driver.num_cached["online"] == 4


# Bounds


@given(st.integers(1, 50), st.lists(st.integers(0, 5), max_size=300))
def test_a_full_queue_takes_the_first_of_every_tenant_and_is_bounded_all_the_same(limit: int, asks: list[int]) -> None:
    counts = dict.fromkeys(range(6), 0)
    for tenant in asks:
        num_tenants = len({other for other, n in counts.items() if n} | {tenant})
        room = has_room(limit, num_all=sum(counts.values()) + 1, num_own=counts[tenant] + 1, num_tenants=num_tenants)
        assert room or counts[tenant] + 1 > limit / num_tenants
        counts[tenant] += room
    assert sum(counts.values()) <= limit * sum(1 / n for n in range(1, 7)) + 1


def test_a_flood_that_fills_the_queue_turns_nobody_else_away() -> None:
    scheduler = Scheduler(make_config(max_queued_requests=8, max_queued_tokens=100))
    for i in range(8):
        scheduler.add(make_request(f"flood{i}", 3, tenant="flood"))
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("more", 3, tenant="flood"))
    for i in range(4):
        scheduler.add(make_request(f"guest{i}", 3, tenant="guest"))
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("one too many", 3, tenant="guest"))
    with pytest.raises(QueueFullError):
        scheduler.check_queue(make_request("too long", 30, tenant="guest"))


def test_requests_on_their_way_count_for_their_own_tenant() -> None:
    """Inbound requests of a flood once counted as everybody's."""
    scheduler, inbound = Scheduler(make_config(max_queued_requests=4)), Backlog()
    for i in range(4):
        inbound.add(make_request(f"flood{i}", 3, tenant="flood"))
    scheduler.check_queue(make_request("guest", 3, tenant="guest"), inbound)
    with pytest.raises(QueueFullError):
        scheduler.check_queue(make_request("more", 3, tenant="flood"), inbound)
