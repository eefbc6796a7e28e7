"""The scheduler's edges, each test named for the bug it keeps away."""

from dataclasses import replace
from typing import Any

import pytest

from nanoserve.core.errors import InvalidRequestError, QueueFullError
from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.plan import AdmittedState, BlockCopy, ModelRunnerOutput, SampledTokens, SchedulerOutput
from nanoserve.core.request import Grammar
from nanoserve.scheduler.scheduler import Scheduler
from tests.engine.driving import Driver, make_config, make_request
from tests.fakes import FakeExecutor


def run_one(driver: Driver, request_id: str, prompt: Any, **fields: Any) -> list[int]:
    driver.add(make_request(request_id, prompt, **fields))
    driver.run()
    return driver.answers[request_id].token_ids


# Prefix cache


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9, 12])
def test_a_wholly_cached_prompt_leaves_its_last_token_to_compute(num_tokens: int, budget: int) -> None:
    """Prompts of k * B, and one beside it: the third time is as the first, and something is always computed."""
    driver = Driver(make_config(max_num_batched_tokens=budget))
    answers = [run_one(driver, f"r{i}", num_tokens, max_tokens=6) for i in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert driver.num_cached["r0"] == 0
    assert driver.num_cached["r2"] == (num_tokens - 1) // 4 * 4


def test_many_cold_copies_of_one_prompt() -> None:
    driver = Driver(make_config(num_blocks=40, max_num_batched_tokens=64))
    for i in range(8):
        driver.add(make_request(f"r{i}", 8))
    assert driver.step().stats.num_scheduled_tokens == 8 + 7 * 4, "the first computes its prompt, the others their ends"
    driver.run()
    assert len({tuple(answer.token_ids) for answer in driver.answers.values()}) == 1
    assert [driver.num_cached[f"r{i}"] for i in range(8)] == [0] + [4] * 7


def test_cold_copies_fit_a_pool_that_holds_their_prompt_once() -> None:
    driver = Driver(make_config(num_blocks=5, max_num_batched_tokens=64))
    for i in range(3):
        driver.add(make_request(f"r{i}", [1] * 8 + [i], max_tokens=1))
    assert len(driver.step().outputs) == 3
    driver.run()


def test_a_prompt_in_the_middle_of_its_chunks_is_shared_by_who_comes_with_its_last_chunk() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("long", [2] * 13, max_tokens=1))
    driver.step()
    driver.add(make_request("same", [2] * 13, max_tokens=1))
    assert {output.request_id for output in driver.step().outputs} == {"long", "same"}
    driver.run()
    assert driver.num_cached["same"] == 12


def test_blocks_joined_in_a_step_outlive_the_request_that_computed_them() -> None:
    """The first is aborted while the step runs; the second, which reads its blocks, files them."""
    config = make_config(max_num_batched_tokens=64)
    scheduler, executor = Scheduler(config), FakeExecutor(config)
    for request_id in ("gone", "stays"):
        scheduler.add(make_request(request_id, 9, max_tokens=2))
    plan = scheduler.schedule()
    result = executor.execute(plan)
    scheduler.abort("gone")
    scheduler.update(plan, result)
    scheduler.check_invariants()
    assert scheduler.stats().num_cached_blocks == 2
    plan = scheduler.schedule()
    outputs = scheduler.update(plan, executor.execute(plan))
    assert [output.request_id for output in outputs if output.new_token_ids] == ["stays"]
    assert scheduler.stats().num_free_blocks == config.num_blocks


def test_an_earlier_grant_does_not_evict_the_block_that_a_later_one_counted_as_a_hit() -> None:
    """Three blocks, all cached. The first newcomer's fresh block would be the LRU one, the second one's only hit."""
    driver = Driver(make_config(num_blocks=3, max_num_batched_tokens=64))
    run_one(driver, "old", [0, 1, 0, 1, 2], max_tokens=1)
    run_one(driver, "newer", [2] * 8, max_tokens=1)
    driver.add(make_request("first", [1] * 4, max_tokens=1))
    driver.add(make_request("second", [0, 1, 0, 1, 2], max_tokens=1))
    assert len(driver.step().outputs) == 2, "both fit"
    driver.run()
    assert driver.num_cached["second"] == 4


def test_a_block_is_not_findable_before_its_step_was_accounted_for() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", 8))
    plan = scheduler.schedule()
    assert scheduler.stats().num_cached_blocks == 0
    scheduler.update(plan, FakeExecutor(make_config()).execute(plan))
    assert scheduler.stats().num_cached_blocks == 2


def test_tenants_and_adapters_do_not_share_a_cache() -> None:
    driver = Driver(make_config())
    for i, fields in enumerate([{}, {"cache_salt": "a"}, {"adapter": "a"}, {}]):
        run_one(driver, f"r{i}", 9, **fields)
    assert [driver.num_cached[f"r{i}"] for i in range(4)] == [0, 0, 0, 8]


def test_without_prefix_caching_nothing_is_found_or_filed() -> None:
    driver = Driver(make_config(enable_prefix_caching=False))
    assert run_one(driver, "a", 9) == run_one(driver, "b", 9)
    assert driver.num_cached["b"] == 0
    assert driver.core.scheduler.stats().num_cached_blocks == 0


# Preemption and the end of the pool


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [4, 64])
def test_a_pool_barely_larger_than_the_longest_request_serves_sixteen_clients(caching: bool, budget: int) -> None:
    config = make_config(num_blocks=9, max_num_seqs=16, max_num_batched_tokens=budget, enable_prefix_caching=caching)
    driver = Driver(config)
    for i in range(16):
        driver.add(make_request(f"r{i}", [(i + j) % 3 for j in range(3 + i)], max_tokens=32 - i, logprobs=0))
    driver.run()
    assert driver.core.scheduler.stats().num_preemptions_total > 0


@pytest.mark.parametrize("num_prompt_tokens", range(1, 12))
def test_a_request_preempted_at_any_length_around_a_block_border_resumes(num_prompt_tokens: int) -> None:
    """The length B * k + 1 among them: its last token opens a block that is not computed yet."""
    driver = Driver(make_config(num_blocks=5, max_num_batched_tokens=64))
    driver.add(make_request("old", 4, max_tokens=14))
    driver.add(make_request("young", [(i * i) % 3 for i in range(num_prompt_tokens)], max_tokens=8))
    driver.run()


def test_blocks_that_a_victim_shares_do_not_come_free() -> None:
    """Two decodes need a block each; the victim shares its prefix with one, so it yields one block, not three."""
    driver = Driver(make_config(num_blocks=7, max_num_batched_tokens=64))
    driver.add(make_request("a", [0] * 8, max_tokens=8))
    driver.add(make_request("b", [1] * 8, max_tokens=8))
    driver.step()
    driver.add(make_request("victim", [0] * 9, max_tokens=8))
    driver.step()
    assert driver.num_cached.get("victim") == 8
    while not driver.core.scheduler.stats().num_preemptions_total:
        driver.step()
    assert [request.request_id for request in driver.executor.plans[-1].scheduled] == ["a"]
    driver.run()


def test_the_lowest_priority_is_the_victim_however_old() -> None:
    driver = Driver(make_config(num_blocks=4, max_num_batched_tokens=64))
    driver.add(make_request("batch", [0] * 7, max_tokens=8, priority=5))
    driver.step()
    driver.add(make_request("chat", [1] * 7, max_tokens=8, priority=0))
    while not driver.core.scheduler.stats().num_preemptions_total:
        driver.step()
    assert "batch" in driver.executor.plans[-1].released_request_ids
    driver.run()


def test_a_better_priority_overtakes_the_queue_and_nothing_else_does() -> None:
    driver = Driver(make_config(num_blocks=4, max_num_batched_tokens=64))
    driver.add(make_request("running", [0] * 7, max_tokens=9))
    driver.step()
    driver.add(make_request("big", [1] * 12, max_tokens=1))
    driver.add(make_request("small", [2], max_tokens=1))
    driver.step()
    assert driver.answers["small"].finish_reason is None, "small overtook the head"
    driver.add(make_request("urgent", [2, 1], max_tokens=1, priority=-1))
    driver.step()
    assert driver.answers["urgent"].finish_reason is FinishReason.LENGTH
    driver.run()


def test_a_lone_request_that_outgrows_the_pool_ends_with_length() -> None:
    driver = Driver(make_config(max_model_len=1000))
    answer = run_one(driver, "r", 28, max_tokens=100)
    assert len(answer) == 8 * 4 + 1 - 28
    assert driver.answers["r"].finish_reason is FinishReason.LENGTH


def test_a_request_that_can_never_fit_is_refused_and_blocks_nobody() -> None:
    driver = Driver(make_config(max_model_len=1000))
    for i in range(6):
        driver.add(make_request(f"r{i}", 3))
    driver.step()
    with pytest.raises(InvalidRequestError, match=r"32 tokens.*Given: 36 tokens"):
        driver.add(make_request("huge", 36, max_tokens=1))
    driver.run()


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(64, 4), (65, 1), (65, 0), (0, 1)])
def test_a_prompt_without_room_in_the_context_is_refused(num_tokens: int, max_tokens: int) -> None:
    scheduler = Scheduler(make_config(num_blocks=100))
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add(make_request("r", num_tokens, max_tokens=max_tokens))
    assert caught.value.param == "prompt"
    assert not scheduler.has_work


def test_a_prompt_one_below_the_context_gets_one_token() -> None:
    driver = Driver(make_config(num_blocks=100))
    assert len(run_one(driver, "r", 63, max_tokens=4)) == 1
    assert driver.answers["r"].finish_reason is FinishReason.LENGTH


# Ends


def first_step(scheduler: Scheduler, token_ids: tuple[int, ...]) -> tuple[SchedulerOutput, RequestOutput]:
    plan = scheduler.schedule()
    sampled = {plan.scheduled[0].request_id: SampledTokens(token_ids)}
    return plan, scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled=sampled))[0]


def test_a_stop_id_before_min_tokens_does_not_end_a_request() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", 3, max_tokens=9, min_tokens=2, stop_token_ids=(7,)))
    outputs = [first_step(scheduler, (7,))[1] for _ in range(3)]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.STOP]
    assert outputs[-1].stop_token_id == 7


def test_a_stop_id_as_the_last_allowed_token_is_a_stop() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", 3, max_tokens=1, stop_token_ids=(7,)))
    assert first_step(scheduler, (7,))[1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 8, 9, 64])
def test_max_tokens_zero_scores_the_prompt_and_samples_nothing(num_tokens: int) -> None:
    driver = Driver(make_config(num_blocks=16))
    for i in range(2):
        assert run_one(driver, f"r{i}", num_tokens, max_tokens=0, prompt_logprobs=0) == []
        assert len(driver.answers[f"r{i}"].prompt_logprobs) == num_tokens - 1
    assert run_one(driver, "plain", num_tokens, max_tokens=0) == []


def test_a_continued_request_counts_what_it_generated_before() -> None:
    """``max_tokens`` and the penalties' split between prompt and output are those of the whole request."""
    driver = Driver(make_config())
    whole = run_one(driver, "whole", 6, max_tokens=5)
    prompt = tuple(i % 3 for i in range(6))
    rest = run_one(driver, "rest", (*prompt, *whole[:2]), max_tokens=5, num_prior_output_tokens=2)
    assert [*whole[:2], *rest] == whole
    admitted = next(r.admitted for plan in driver.executor.plans for r in plan.scheduled if r.request_id == "rest")
    assert admitted is not None
    assert admitted.num_prompt_tokens == 6
    assert run_one(driver, "over", (*prompt, *whole), max_tokens=5, num_prior_output_tokens=5) == []


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_scores_delivered_before_a_preemption_are_not_delivered_twice(caching: bool) -> None:
    """The young one is preempted after 15 scores, in the middle of a block; it neither repeats nor skips any."""
    driver = Driver(make_config(num_blocks=7, max_num_batched_tokens=4, enable_prefix_caching=caching))
    driver.add(make_request("old", [0] * 3, max_tokens=12))
    driver.step()
    driver.add(make_request("young", [1] * 20, max_tokens=2, prompt_logprobs=0))
    while not driver.core.scheduler.stats().num_preemptions_total:
        driver.step()
    assert len(driver.answers["young"].prompt_logprobs) == 15
    driver.run()


def test_a_scored_prompt_is_computed_even_when_it_is_cached() -> None:
    driver = Driver(make_config())
    run_one(driver, "cold", 9)
    run_one(driver, "scored", 9, prompt_logprobs=0)
    assert driver.num_cached["scored"] == 0
    assert len(driver.answers["scored"].prompt_logprobs) == 8


# Coming and going


def test_an_id_in_use_is_refused_and_may_be_used_again_after_its_end() -> None:
    driver = Driver(make_config())
    driver.add(make_request("r", 3))
    with pytest.raises(InvalidRequestError, match="request_id"):
        driver.core.add(make_request("r", 3))
    driver.run()
    run_one(driver, "r", 3)


@pytest.mark.parametrize("state", ["waiting", "mid-chunk", "running", "preempted"])
def test_an_abort_in_any_state_frees_everything_at_once(state: str) -> None:
    config = make_config(num_blocks=5, max_num_seqs=2, max_num_batched_tokens=4)
    driver = Driver(config)
    driver.add(make_request("old", 4, max_tokens=14))
    driver.step()
    driver.add(make_request("r", [1] * 8, max_tokens=8))
    if state != "waiting":
        driver.step()
    if state in ("running", "preempted"):
        driver.step()
        driver.step()
    while state == "preempted" and not driver.core.scheduler.stats().num_preemptions_total:
        driver.step()
    held_by_old = len(driver.executor.held["old"].block_table)
    driver.core.abort("r")
    driver.core.scheduler.check_invariants()
    assert driver.num_free == 5 - held_by_old
    driver.step()
    assert driver.answers["r"].finish_reason is FinishReason.ABORT
    driver.run()
    assert list(driver.executor.held) == ["old"], "the executor still holds the aborted request"


def test_an_id_aborted_and_added_again_does_not_get_the_first_ones_tokens() -> None:
    """Also while the aborted one's step is still running."""
    driver = Driver(make_config())
    driver.add(make_request("r", [0] * 5))
    driver.step()
    scheduler = driver.core.scheduler
    plan = scheduler.schedule()
    driver.core.abort("r")
    scheduler.add(make_request("r", [1] * 6))
    outputs = scheduler.update(plan, driver.executor.execute(plan))
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
    driver.requests["r"] = make_request("r", [1] * 6)
    driver.answers["r"].token_ids.clear()
    driver.run()
    assert len(driver.answers["r"].token_ids) == 4


def test_an_unknown_id_is_ignored() -> None:
    scheduler = Scheduler(make_config())
    scheduler.abort("nobody")
    assert not scheduler.has_work


def test_deadlines_end_waiting_and_running_requests() -> None:
    now_s = [100.0]
    driver = Driver(make_config(max_num_seqs=1), clock=lambda: now_s[0])
    driver.add(make_request("running", 3, max_tokens=20, deadline_s=105.0))
    driver.add(make_request("waiting", 3, max_tokens=20, deadline_s=104.0))
    driver.add(make_request("fine", 3, max_tokens=2))
    driver.step()
    now_s[0] = 110.0
    driver.run()
    assert {id_: error[0] for id_, error in driver.errors.items()} == dict.fromkeys(
        ("running", "waiting"), "timeout_error"
    )
    assert "1 generated tokens" in driver.errors["running"][1]
    assert driver.answers["fine"].finish_reason is FinishReason.LENGTH


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    driver = Driver(make_config(), clock=lambda: 0.0)
    for i in range(300):
        run_one(driver, "r", 1, max_tokens=1, deadline_s=1000.0 + i)
    assert len(driver.core.scheduler._deadlines._heap) < 100


def test_a_full_queue_says_when_to_come_back() -> None:
    now_s = [0.0]
    driver = Driver(make_config(max_num_seqs=1, max_queued_requests=2), clock=lambda: now_s[0])
    for i in range(3):
        driver.add(make_request(f"r{i}", 3, max_tokens=1))
        driver.step()
        now_s[0] += 4.0
    driver.add(make_request("a", 3))
    driver.add(make_request("b", 3))
    with pytest.raises(QueueFullError) as caught:
        driver.add(make_request("c", 3))
    assert caught.value.retry_after_s == pytest.approx(12.0 / 3)
    driver.run()


def test_the_queue_is_bounded_by_prompt_tokens_but_an_empty_one_takes_any_prompt() -> None:
    scheduler = Scheduler(make_config(max_queued_tokens=10))
    scheduler.add(make_request("a", 20))
    with pytest.raises(QueueFullError, match="20 prompt tokens") as caught:
        scheduler.add(make_request("b", 1))
    assert caught.value.retry_after_s == 1.0


# What speculation, swap and adapters need of the plan


def test_drafts_are_verified_in_one_step_and_refuted_ones_rolled_back() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", 3, max_tokens=10))
    first_step(scheduler, (5,))
    scheduler.propose("r", [6, 7, 8])
    plan, output = first_step(scheduler, (6, 9))
    request = plan.scheduled[0]
    assert (request.token_ids, request.num_logits, request.num_samples) == ((5, 6, 7, 8), 4, 4)
    assert request.new_block_ids, "drafts reach into the next block"
    assert output.new_token_ids == (6, 9)
    plan, _ = first_step(scheduler, (1,))
    assert (plan.scheduled[0].token_ids, plan.scheduled[0].num_computed_tokens) == ((9,), 5)
    scheduler.check_invariants()


def test_what_follows_a_stop_among_accepted_drafts_is_dropped() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", 3, max_tokens=10, stop_token_ids=(7,)))
    first_step(scheduler, (5,))
    scheduler.propose("r", [6, 7, 8])
    _, output = first_step(scheduler, (6, 7, 8, 1))
    assert (output.new_token_ids, output.finish_reason) == ((6, 7), FinishReason.STOP)
    assert scheduler.stats().num_free_blocks == 8


def test_drafts_that_were_not_granted_are_not_tried_one_step_late() -> None:
    scheduler = Scheduler(make_config(max_num_batched_tokens=2))
    scheduler.add(make_request("r", 2, max_tokens=9))
    first_step(scheduler, (5,))
    scheduler.add(make_request("s", 1, max_tokens=2))
    plan = scheduler.schedule()
    sampled = {r.request_id: SampledTokens((5,)) for r in plan.scheduled}
    scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled=sampled))
    scheduler.propose("r", [6])
    plan = scheduler.schedule()
    assert [len(r.token_ids) for r in plan.scheduled] == [1, 1]
    scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled=sampled))
    assert scheduler.schedule().scheduled[0].token_ids == (5,)


def test_drafts_never_reach_beyond_the_end() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", 3, max_tokens=3))
    first_step(scheduler, (5,))
    scheduler.propose("r", [6, 7, 8])
    plan, output = first_step(scheduler, (6, 7))
    assert plan.scheduled[0].token_ids == (5, 6)
    assert (output.new_token_ids, output.finish_reason) == ((6, 7), FinishReason.LENGTH)


def test_samples_that_do_not_follow_the_drafts_are_a_fault_of_the_executor() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", 3))
    first_step(scheduler, (5,))
    scheduler.propose("r", [6, 7])
    with pytest.raises(AssertionError, match="do not follow"):
        first_step(scheduler, (7, 1))


def test_block_copies_adapters_and_grammars_go_with_the_next_plan() -> None:
    scheduler = Scheduler(make_config())
    copy = BlockCopy(source_block_id=0, target_block_id=7, target="host")
    scheduler.copy_blocks([copy])
    assert scheduler.schedule().block_copies == (), "an empty step is not executed"
    scheduler.update(SchedulerOutput(step_id=1, scheduled=()), ModelRunnerOutput(step_id=1))
    request = make_request("r", 3, adapter="french", grammar=Grammar("start: /a+/", (0,)))
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan.block_copies == (copy,)
    assert plan.scheduled[0].admitted == AdmittedState(
        token_ids=request.prompt_token_ids,
        num_prompt_tokens=3,
        sampling=request.sampling,
        grammar=request.grammar,
        adapter="french",
    )


def test_kv_that_another_tier_brings_back_is_copied_before_the_step() -> None:
    """The executor loses a block in use; a copy planned with the step puts it right, or the tokens would differ."""
    driver = Driver(make_config())
    driver.add(make_request("r", 6, max_tokens=4))
    driver.step()
    block_id = driver.executor.held["r"].block_table[0]
    driver.executor.host_kv[3] = list(driver.executor.kv[block_id])
    driver.executor.kv[block_id] = [0] * 4
    driver.core.scheduler.copy_blocks([BlockCopy(source_block_id=3, target_block_id=block_id, source="host")])
    driver.run()


def test_prompt_events_name_the_blocks() -> None:
    driver = Driver(make_config(num_blocks=2))
    driver.add(make_request("a", 8, max_tokens=1))
    published = driver.step().stats.blocks_published
    assert len(published) == 2
    driver.add(make_request("b", [1] * 8, max_tokens=1))
    evicted = driver.step().stats.blocks_evicted
    assert sorted(evicted) == sorted(published)


def test_equal_calls_give_equal_plans() -> None:
    def plans() -> list[SchedulerOutput]:
        driver = Driver(make_config(num_blocks=7, max_num_batched_tokens=5), clock=lambda: 0.0)
        for i in range(6):
            driver.add(make_request(f"r{i}", 3 + 2 * i, max_tokens=9, priority=i % 2))
        driver.run()
        return driver.executor.plans

    assert plans() == plans()


def test_what_the_executor_says_of_one_request_ends_that_one_only() -> None:
    scheduler = Scheduler(make_config())
    for request_id in ("broken", "fine"):
        scheduler.add(make_request(request_id, 3))
    plan = scheduler.schedule()
    error = ("invalid_request_error", "no")
    sampled = {"broken": SampledTokens(error=error), "fine": SampledTokens(token_ids=(1,))}
    outputs = {
        o.request_id: o for o in scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled=sampled))
    }
    assert (outputs["broken"].finish_reason, outputs["broken"].error) == (FinishReason.ERROR, error)
    assert outputs["fine"].finish_reason is None
    scheduler.check_invariants()
    assert scheduler.schedule().released_request_ids == ("broken",)


# Telemetry


def test_a_requests_time_in_the_queue_is_told_once() -> None:
    clock = [1000.0]
    scheduler = Scheduler(make_config(max_num_seqs=1), clock=lambda: clock[0])
    for name, arrival_s in (("first", 990.0), ("second", 995.0)):
        scheduler.add(replace(make_request(name, 4, max_tokens=1), arrival_s=arrival_s))
    told = []
    for clock[0] in (1000.0, 1007.0, 1009.0):
        plan = scheduler.schedule()
        sampled = {request.request_id: SampledTokens(token_ids=(1,)) for request in plan.scheduled}
        scheduler.update(plan, ModelRunnerOutput(step_id=plan.step_id, sampled=sampled))
        told.append(scheduler.stats().queue_times_s)
    assert told == [(10.0,), (12.0,), ()]
