"""Driving an engine core in tests: make requests and configs briefly, collect answers, step until nothing is left."""

from collections.abc import Callable
from typing import Any

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.plan import BlockCopy
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.core import EngineCore, EngineUpdate
from tests.fakes import Answer, FakeExecutor, alone

VOCAB_SIZE = 3
_SAMPLING_FIELDS = {"max_tokens", "min_tokens", "stop_token_ids", "seed", "logprobs", "prompt_logprobs"}


def make_config(**changes: Any) -> SchedulerConfig:
    """A small pool: 8 blocks of 4 tokens, 8 tokens a step."""
    settings = {"num_blocks": 8, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 64}
    return SchedulerConfig(**{**settings, **changes})


def make_request(request_id: str, prompt: Any, **fields: Any) -> GenerateRequest:
    """A greedy request for ``prompt``, token ids or how many; sampling fields may be given among the others."""
    token_ids = tuple(i % VOCAB_SIZE for i in range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    sampling = {name: fields.pop(name) for name in list(fields) if name in _SAMPLING_FIELDS}
    params = SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": 4, **sampling})
    return GenerateRequest(request_id=request_id, prompt_token_ids=token_ids, sampling=params, **fields)


class Driver:
    """An engine core over a fake executor, with the answers so far and the invariants checked after every step."""

    def __init__(
        self, config: SchedulerConfig, *, loses: Callable[[BlockCopy], bool] = lambda copy: False, **core_options: Any
    ) -> None:
        self.config = config
        self.executor = FakeExecutor(config, vocab_size=VOCAB_SIZE, loses=loses)
        self.core = EngineCore(self.executor, config, **core_options)
        self.requests: dict[str, GenerateRequest] = {}
        self.answers: dict[str, Answer] = {}
        self.errors: dict[str, tuple[str, str]] = {}
        self.num_cached: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        return self.core.scheduler.stats().num_free_blocks

    def add(self, request: GenerateRequest) -> None:
        self.core.add(request)
        self.requests[request.request_id] = request
        self.answers[request.request_id] = Answer()

    def step(self) -> EngineUpdate:
        update = self.core.step()
        for output in update.outputs:
            self._collect(output)
        self.core.scheduler.check_invariants()
        assert update.stats.num_scheduled_tokens <= self.config.max_num_batched_tokens
        return update

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is open, check every answer, and that nothing is left behind."""
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "requests are still open"
        stats = self.core.scheduler.stats()
        assert stats.num_free_blocks == self.config.num_blocks
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
        for request_id in self.answers:
            self.check_answer(request_id)

    def check_answer(self, request_id: str) -> None:
        """A finished answer equals the answer alone; one ended early is its beginning."""
        answer, expected = self.answers[request_id], alone(self.requests[request_id], self.config, VOCAB_SIZE)
        if answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert answer == expected, f"{request_id}: {answer} but alone {expected}"
            return
        for name in ("token_ids", "logprobs", "prompt_logprobs", "pooled"):
            got = getattr(answer, name)
            assert got == getattr(expected, name)[: len(got)], f"{request_id}: {name}"

    def _collect(self, output: RequestOutput) -> None:
        answer = self.answers[output.request_id]
        assert answer.finish_reason is None, f"{output.request_id} speaks after its end"
        answer.token_ids.extend(output.new_token_ids)
        answer.logprobs.extend(output.logprobs)
        answer.prompt_logprobs.extend(output.prompt_logprobs)
        answer.finish_reason = output.finish_reason
        answer.pooled = output.pooled
        self.num_cached[output.request_id] = output.num_cached_tokens
        is_stop = output.finish_reason is FinishReason.STOP
        assert output.stop_token_id == (output.new_token_ids[-1] if is_stop else None)
        assert (output.error is not None) == (output.finish_reason is FinishReason.ERROR)
        if output.error is not None:
            self.errors[output.request_id] = output.error
