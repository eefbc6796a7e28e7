"""Runs requests through a ModelRunner under plans that a test chooses: chunks, batches, blocks, preemption, warmth.

A stand-in for the scheduler that does on purpose what a scheduler does by necessity.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoserve.core.plan import AdmittedState, ScheduledRequest, SchedulerOutput, TokenLogprobs
from nanoserve.core.sampling import SamplingParams
from nanoserve.model.build import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How to plan. ``preempt_one_in`` 0: never; ``reuse_prefixes``: full blocks of equal prefixes are shared."""

    max_chunk: int = 10_000
    max_batch: int = 10_000
    preempt_one_in: int = 0
    reuse_prefixes: bool = False
    seed: int = 0


@dataclass(slots=True)
class _Request:
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_tokens: int
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_held: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) - self.num_prompt_tokens >= self.max_tokens


class Driver:
    """One run over a loaded model; ``requests`` holds the results."""

    def __init__(self, loaded: LoadedModel, habits: Habits) -> None:
        self._runner, self._size, self._habits = loaded.runner, loaded.scheduler.block_size, habits
        self._rng = random.Random(habits.seed)
        self._free = list(range(loaded.scheduler.num_blocks))
        self._rng.shuffle(self._free)
        self._shared: dict[tuple[int, ...], int] = {}
        self._released: list[str] = []
        self.num_preemptions = 0

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[_Request]:
        """Generates ``max_tokens`` tokens after each prompt; stop tokens do not stop."""
        requests = [
            _Request(f"{id(self)}-{i}", list(prompt), len(prompt), params, params.max_tokens or 0)
            for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        ]
        step = 0
        while not all(request.is_done for request in requests):
            open_requests = [request for request in requests if not request.is_done]
            self._preempt(open_requests)
            self._rng.shuffle(open_requests)
            self._step(step, open_requests[: self._rng.randint(1, self._habits.max_batch)])
            self._released += [r.request_id for r in requests if r.is_done and r.is_held]
            for request in requests:
                if request.is_done and request.is_held:
                    self._drop(request)
            step += 1
        self._runner.execute(SchedulerOutput(step_id=step, scheduled=(), released_request_ids=tuple(self._released)))
        return requests

    def _preempt(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            if request.is_held and self._habits.preempt_one_in and not self._rng.randrange(self._habits.preempt_one_in):
                self._released.append(request.request_id)
                self._drop(request)
                self.num_preemptions += 1

    def _drop(self, request: _Request) -> None:
        request.is_held, request.num_computed = False, 0
        kept = set(self._shared.values())
        self._free += [block_id for block_id in request.block_ids if block_id not in kept]
        self._rng.shuffle(self._free)
        request.block_ids = []

    def _step(self, step_id: int, requests: Sequence[_Request]) -> None:
        scheduled = [self._schedule(request) for request in requests]
        plan = SchedulerOutput(step_id=step_id, scheduled=tuple(scheduled), released_request_ids=tuple(self._released))
        self._released = []
        output = self._runner.execute(plan)
        assert output.step_id == step_id
        for request, share in zip(requests, scheduled, strict=True):
            request.num_computed += len(share.token_ids)
            self._publish(request)
            if request.request_id in output.sampled:
                sampled = output.sampled[request.request_id]
                request.token_ids += sampled.token_ids
                request.logprobs += sampled.logprobs
                request.prompt_logprobs += sampled.prompt_logprobs

    def _schedule(self, request: _Request) -> ScheduledRequest:
        admitted = None
        if not request.is_held:
            request.is_held = True
            admitted = AdmittedState(
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
            )
            self._adopt(request)
        first = request.num_computed
        left = len(request.token_ids) - first
        count = min(left, self._rng.randint(1, self._habits.max_chunk))
        new_blocks = -(-(first + count) // self._size) - len(request.block_ids)
        fresh = [self._free.pop() for _ in range(new_blocks)]
        adopted = list(request.block_ids) if admitted else []
        request.block_ids += fresh
        is_last = count == left
        scores = request.sampling.prompt_logprobs is not None and first < request.num_prompt_tokens
        scored = min(first + count, request.num_prompt_tokens - 1) - first if scores else 0
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids[first : first + count]),
            num_computed_tokens=first,
            new_block_ids=tuple(adopted + fresh),
            num_logits=scored + is_last,
            num_samples=int(is_last),
            admitted=admitted,
        )

    def _adopt(self, request: _Request) -> None:
        """Takes over full blocks of a known prefix, but never the last token: something must be computed."""
        tokens = tuple(request.token_ids)
        for end in range(self._size, len(tokens), self._size):
            if tokens[:end] not in self._shared or request.sampling.prompt_logprobs is not None:
                break
            request.block_ids.append(self._shared[tokens[:end]])
            request.num_computed = end

    def _publish(self, request: _Request) -> None:
        if self._habits.reuse_prefixes:
            for index, block_id in enumerate(request.block_ids):
                end = (index + 1) * self._size
                if end <= request.num_computed:
                    self._shared.setdefault(tuple(request.token_ids[:end]), block_id)
