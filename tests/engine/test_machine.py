"""Any interleaving of adds, aborts, steps, late deadlines and drafts gives each request the answer it gets alone.

Two-token prompts, tiny pools and tiny budgets make prefix collisions, preemptions and partial chunks the usual case.
"""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.hashing import block_hash
from nanoserve.core.outputs import FinishReason
from nanoserve.core.pooling import PoolingKind, PoolingParams
from nanoserve.core.request import GenerateRequest
from tests.engine.driving import VOCAB_SIZE, Driver, make_request
from tests.fakes import alone

tiers = st.sampled_from([(0, 0), (0, 0), (1, 0), (3, 0), (30, 0), (1, 1), (2, 4), (4, 40), (30, 40)])
configs = st.builds(
    lambda tiers, **counts: SchedulerConfig(num_host_blocks=tiers[0], num_disk_blocks=tiers[1], **counts),
    tiers,
    num_blocks=st.integers(2, 12),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 8) | st.just(30),
    max_model_len=st.integers(4, 40),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    num_speculative_tokens=st.sampled_from([0, 0, 1, 5]),
)
stems = st.sampled_from([(0,) * 9, (1,) * 9, (0, 1) * 5])
prompts = st.builds(
    lambda stem, length, tail: [*stem[:length], *tail],
    stems,
    st.integers(0, 10),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)


def weak_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """A hash of two values: nearly every lookup is a collision."""
    return bytes([block_hash(parent, token_ids)[0] % 2])


class EngineMachine(RuleBasedStateMachine):
    """The engine against the answers by definition."""

    @initialize(config=configs, collides=st.booleans(), num_good=st.sampled_from([0, 1, 3, 10**9]))
    def start(self, config: SchedulerConfig, collides: bool, num_good: int) -> None:
        """After ``num_good`` good copies each, one from or to the disk fails."""
        self.patch = patch("nanoserve.scheduler.sequence.block_hash", weak_hash if collides else block_hash)
        self.patch.start()
        self.now_s = 1000.0
        copies = itertools.cycle([False] * min(num_good, 4) + [True] * (num_good < 4))
        self.driver = Driver(config, clock=lambda: self.now_s, loses=lambda copy: next(copies))
        self.aborted: set[str] = set()

    @rule(prompt=prompts, copies=st.integers(1, 3), max_tokens=st.integers(1, 20))
    def add_plain(self, prompt: list[int], copies: int, max_tokens: int) -> None:
        """Several that differ in their last token only: they meet in the cache and compete for the pool."""
        for i in range(copies):
            self._add(prompt=[*prompt, i], max_tokens=max_tokens)

    @rule(data=st.data(), prompt=prompts, max_tokens=st.integers(0, 12) | st.none())
    def add_special(self, data: st.DataObject, prompt: list[int], max_tokens: int | None) -> None:
        self._add(
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=data.draw(st.integers(0, 3 if max_tokens is None else min(3, max_tokens))),
            stop_token_ids=data.draw(st.sampled_from([(), (2,), (0, 2)])),
            prompt_logprobs=data.draw(st.sampled_from([None, 0])),
            logprobs=data.draw(st.sampled_from([None, 0])),
            priority=data.draw(st.integers(0, 2)),
            tenant=data.draw(st.sampled_from(["", "a", "b"])),
            adapter=data.draw(st.sampled_from([None, "a"])),
            cache_salt=data.draw(st.sampled_from(["", "tenant"])),
            deadline_s=data.draw(st.sampled_from([None, self.now_s + 3])),
            num_prior_output_tokens=data.draw(st.sampled_from([0, len(prompt) - 1])),
        )

    @rule(prompt=prompts, copies=st.integers(1, 3), priority=st.integers(0, 1))
    def add_pooling(self, prompt: list[int], copies: int, priority: int) -> None:
        """They share prefixes with answers and with each other, and end with their prompts."""
        pooling = PoolingParams(kind=PoolingKind.SCORE, token_ids=(1,))
        for i in range(copies):
            self._add(prompt=[*prompt, i], max_tokens=0, priority=priority, pooling=pooling)

    def _add(self, prompt: list[int], **fields: Any) -> None:
        request = make_request(f"r{len(self.driver.requests)}", prompt, **fields)
        if self._fits(request):
            self.driver.add(request)
        else:
            self._check_refused(request)

    def _fits(self, request: GenerateRequest) -> bool:
        config, sampling, num_tokens = self.driver.config, request.sampling, len(request.prompt_token_ids)
        num_slots = config.num_blocks * config.block_size
        num_output = request.num_prior_output_tokens
        samples = num_output < (sampling.max_tokens if sampling.max_tokens is not None else 10**9)
        if num_tokens >= config.max_model_len and (samples and not num_output):
            return False
        ends_at_once = not samples or num_tokens >= min(config.max_model_len, num_slots + 1)
        is_computed = not ends_at_once or request.pooling is not None
        return num_tokens <= config.max_model_len and num_tokens - (not is_computed) <= num_slots

    def _check_refused(self, request: GenerateRequest) -> None:
        with pytest.raises(InvalidRequestError, match=str(len(request.prompt_token_ids))) as caught:
            self.driver.core.add(request)
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            update = self.driver.step()
            is_idle = not (update.stats.num_running or update.stats.num_waiting)
            assert update.stats.num_scheduled_tokens or is_idle or self.driver.config.num_disk_blocks

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self._open()))
        self.driver.core.abort(request_id)
        self.driver.core.abort(request_id)
        self.aborted.add(request_id)

    @precondition(lambda self: self._open())
    @rule(data=st.data(), num_right=st.integers(0, 4), rest=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3))
    def propose(self, data: st.DataObject, num_right: int, rest: list[int]) -> None:
        """Drafts that begin with some of the right tokens."""
        request_id = data.draw(st.sampled_from(self._open()))
        request = self.driver.requests[request_id]
        coming = alone(request, self.driver.config, VOCAB_SIZE).token_ids
        num_given = len(self.driver.answers[request_id].token_ids)
        self.driver.core.scheduler.propose(request_id, [*coming[num_given : num_given + num_right], *rest])

    @rule()
    def wait(self) -> None:
        self.now_s += 2.0

    @invariant()
    def holds_what_must_hold(self) -> None:
        if hasattr(self, "driver"):
            self.driver.core.scheduler.check_invariants()

    def _open(self) -> list[str]:
        answers = self.driver.answers.items()
        return [id_ for id_, answer in answers if answer.finish_reason is None and id_ not in self.aborted]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        try:
            self.driver.run()
            self._check_ends()
        finally:
            self.patch.stop()

    def _check_ends(self) -> None:
        for request_id, answer in self.driver.answers.items():
            ended_at_once = not answer.token_ids and answer.finish_reason is FinishReason.LENGTH
            was_aborted = request_id in self.aborted and not ended_at_once
            assert (answer.finish_reason is FinishReason.ABORT) == was_aborted
            if answer.finish_reason is FinishReason.ERROR:
                assert self.driver.errors[request_id][0] == "timeout_error"
                assert (self.driver.requests[request_id].deadline_s or self.now_s) < self.now_s
            num_prompt_tokens = len(self.driver.requests[request_id].prompt_token_ids)
            assert self.driver.num_cached[request_id] < num_prompt_tokens


EngineMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase
