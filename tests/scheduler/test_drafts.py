"""Guesses against a slow search for the longest, then latest match; their pace; and what they save and cost a step."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError
from nanoserve.core.plan import ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput
from nanoserve.scheduler.drafts import MAX_ROWS, Drafter, spare_rows
from nanoserve.scheduler.scheduler import Scheduler
from tests.engine.driving import make_config, make_request

Text = Callable[[int], int]
"""The token at each position of a request."""


def best_start(token_ids: Sequence[int]) -> int:
    """Where the longest earlier occurrence (2 to 8 tokens) of the end goes on, the latest of equals; 0: nowhere."""
    for length in range(min(8, len(token_ids) - 1), 1, -1):
        end = tuple(token_ids[-length:])
        for start in range(len(token_ids) - 1, length - 1, -1):
            if tuple(token_ids[start - length : start]) == end:
                return start
    return 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 8))
def test_a_guess_goes_on_from_the_longest_then_latest_match(token_ids: list[int], num_drafts: int) -> None:
    """Texts this short have fewer candidates than the search may look at."""
    guess = Drafter(8).guess(token_ids, num_drafts)
    start = best_start(token_ids)
    if not start:
        assert guess == ()
        return
    following = list(token_ids[start:])
    while len(following) < num_drafts:
        following += token_ids[start:]
    assert guess == tuple(following[: min(num_drafts, 4)])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 60))
def test_an_index_that_grows_guesses_as_one_made_at_once(token_ids: list[int], cut: int) -> None:
    grown = Drafter(8)
    for end in (*range(1, cut), len(token_ids)):
        grown.guess(token_ids[:end], 8)
    assert grown.guess(token_ids, 8) == Drafter(8).guess(token_ids, 8)


def test_a_long_match_is_found_among_many_short_ones() -> None:
    """The pair (1, 2) ends in 3 ten times since the place where all of (9, 8, 1, 2) was seen."""
    token_ids = [9, 8, 1, 2, 7, *[1, 2, 3] * 10, 9, 8, 1, 2]
    assert Drafter(1).guess(token_ids, 1) == (7,)


def test_the_pace_follows_acceptance() -> None:
    drafter, token_ids = Drafter(20), [1, 2, 3] * 4
    sizes = []
    for accepted in (4, 8, 16, 5, 5, 10):
        sizes.append(len(drafter.guess(token_ids, 100)))
        drafter.learn(sizes[-1], accepted, len(token_ids))
    assert sizes == [4, 8, 16, 20, 5, 10]


def test_a_text_that_never_goes_on_as_before_costs_one_draft_in_32_tokens() -> None:
    drafter, token_ids, num_drafts = Drafter(8), [1, 2], 0
    for i in range(1000):
        token_ids += [i + 10, 1, 2]  # the pair repeats, what follows does not
        guess = drafter.guess(token_ids, 8)
        if guess:
            num_drafts += len(guess)
            drafter.learn(len(guess), 0, len(token_ids))
    assert 3000 / 40 < num_drafts < 3000 / 32 + 10


@pytest.mark.parametrize(
    ("num_rows", "num_decoding", "num_waiting", "expected"),
    [(1, 1, 0, 15), (4, 4, 0, 3), (9, 9, 0, 0), (16, 16, 0, 0), (200, 1, 0, 0), (1, 1, 1, 0), (0, 0, 0, 0)],
)
def test_drafts_fill_a_step_only_up_to_where_it_is_bound_by_memory(
    num_rows: int, num_decoding: int, num_waiting: int, expected: int
) -> None:
    assert spare_rows(num_rows, num_decoding, num_waiting) == expected
    assert num_rows + num_decoding * expected <= max(MAX_ROWS, num_rows)


def answer(request: ScheduledRequest, text: Text) -> SampledTokens:
    """What an executor of a model that writes ``text`` says: samples up to the first that is no draft."""
    first = request.num_computed_tokens + len(request.token_ids) - request.num_samples + 1
    drafts = request.token_ids[len(request.token_ids) - request.num_samples + 1 :]
    token_ids: list[int] = []
    for position, draft in enumerate((*drafts, None), start=first):
        token_ids.append(text(position))
        if token_ids[-1] != draft:
            break
    return SampledTokens(tuple(token_ids))


def run(texts: Sequence[Text], *, num_tokens: int = 120, num_speculative_tokens: int = 8) -> list[SchedulerOutput]:
    """Requests that each write their text, stepped to the end; checks the answers and the blocks, gives the plans."""
    config = make_config(
        num_blocks=1024,
        max_num_seqs=64,
        max_num_batched_tokens=64,
        max_model_len=512,
        num_speculative_tokens=num_speculative_tokens,
    )
    scheduler = Scheduler(config)
    for i in range(len(texts)):
        scheduler.add(make_request(f"r{i}", 3, max_tokens=num_tokens))
    plans: list[SchedulerOutput] = []
    got: dict[str, list[int]] = {f"r{i}": [] for i in range(len(texts))}
    while scheduler.has_work:
        plans.append(scheduler.schedule())
        sampled = {r.request_id: answer(r, texts[int(r.request_id[1:])]) for r in plans[-1].scheduled}
        for output in scheduler.update(plans[-1], ModelRunnerOutput(step_id=plans[-1].step_id, sampled=sampled)):
            got[output.request_id] += output.new_token_ids
        scheduler.check_invariants()
    assert got == {f"r{i}": [text(p) for p in range(3, 3 + num_tokens)] for i, text in enumerate(texts)}
    assert scheduler.stats().num_free_blocks == 1024
    num_drafts = sum(r.num_samples - 1 for plan in plans for r in plan.scheduled)
    stats = scheduler.stats()
    assert stats.num_draft_tokens_total == num_drafts
    assert stats.num_accepted_tokens_total == sum(len(text_) for text_ in got.values()) - sum(
        len(plan.scheduled) for plan in plans
    )
    return plans


def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps() -> None:
    assert len(run([lambda position: position % 7], num_speculative_tokens=0)) == 120
    assert len(run([lambda position: position % 7])) < 30


def test_a_text_that_never_repeats_itself_is_left_alone() -> None:
    plans = run([lambda position: position * 31 % 1009])
    assert all(request.num_samples == 1 for plan in plans for request in plan.scheduled)


def test_a_large_batch_is_left_alone_and_a_small_one_shares_the_room() -> None:
    looping = [lambda position: position % 5] * 20
    plans = run(looping)
    assert len(plans) == 120
    assert max(plan.num_tokens for plan in run(looping[:4])) == 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculation": "eagle"}, "none, ngram"),
        ({"num_speculative_tokens": 4}, "needs `speculation`"),
        ({"speculation": "ngram", "num_speculative_tokens": 0}, ">= 1"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**settings)  # type: ignore[arg-type]


def test_settings_say_how_many_drafts() -> None:
    assert EngineArgs().max_drafts == 0
    assert EngineArgs(speculation="ngram").max_drafts == 8
    assert EngineArgs(speculation="ngram", num_speculative_tokens=3).max_drafts == 3
