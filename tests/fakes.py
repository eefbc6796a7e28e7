"""A fake executor whose tokens depend on the whole prefix, read back from fake KV by block table and slot.

A slot's content is a hash of everything before it and its token, so a wrong block, stale KV, a missing copy or a wrong
position changes the tokens that follow. ``alone`` computes what a request must get, from its tokens only. The fake
refuses what a real runner refuses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.outputs import FinishReason
from nanoserve.core.plan import (
    AdmittedState,
    ModelRunnerOutput,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from nanoserve.core.pooling import PoolingParams
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams


def slot_value(prefix: Sequence[int], token_id: int, adapter: str | None) -> int:
    """What a position's KV holds: a function of all earlier slots, the token and the adapter."""
    text = f"{list(prefix)} {token_id} {adapter}"
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little")


def choose(prefix: Sequence[int], sampling: SamplingParams, num_output_tokens: int, vocab_size: int) -> int:
    """The token after the prefix: a function of its KV and the seed; stop ids are masked before ``min_tokens``."""
    masked = set(sampling.stop_token_ids or ()) if num_output_tokens < sampling.min_tokens else set()
    allowed = [token_id for token_id in range(vocab_size) if token_id not in masked]
    return allowed[slot_value(prefix, -1, str(sampling.seed)) % len(allowed)]


def score(prefix: Sequence[int], token_id: int) -> TokenLogprobs:
    """A log probability entry that depends on the whole prefix and the token."""
    return TokenLogprobs(token_id=token_id, logprob=-(slot_value(prefix, token_id, "score") % 997) / 100, rank=1)


def pool(prefix: Sequence[int], params: PoolingParams) -> bytes:
    """A vector that depends on the whole prefix, the last token included, and on what was asked for."""
    return slot_value(prefix, -1, repr(params)).to_bytes(8, "little")


@dataclass
class Answer:
    """What one request got in the end."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    pooled: bytes = b""


def alone(request: GenerateRequest, config: SchedulerConfig, vocab_size: int) -> Answer:
    """The answer by definition: no blocks, no batch, no scheduler."""
    sampling, known = request.sampling, list(request.prompt_token_ids)
    num_prompt_tokens = len(known) - request.num_prior_output_tokens
    kv: list[int] = []
    for token_id in known:
        kv.append(slot_value(kv, token_id, request.adapter))
    answer = Answer()
    if sampling.prompt_logprobs is not None:
        answer.prompt_logprobs = [score(kv[: i + 1], known[i + 1]) for i in range(num_prompt_tokens - 1)]
    if request.pooling is not None:
        answer.pooled = pool(kv, request.pooling)
    limit = min(config.max_model_len, config.num_blocks * config.block_size + 1)
    if sampling.max_tokens is not None:
        limit = min(limit, num_prompt_tokens + sampling.max_tokens)
    answer.finish_reason = FinishReason.LENGTH
    while len(known) < limit:
        token_id = choose(kv, sampling, len(known) - num_prompt_tokens, vocab_size)
        answer.token_ids.append(token_id)
        if sampling.logprobs is not None:
            answer.logprobs.append(score(kv, token_id))
        if token_id in (sampling.stop_token_ids or ()) and len(known) - num_prompt_tokens >= sampling.min_tokens:
            answer.finish_reason = FinishReason.STOP
            break
        known.append(token_id)
        kv.append(slot_value(kv, token_id, request.adapter))
    return answer


@dataclass
class _Held:
    """What the fake keeps of an admitted request, as a runner's own mirror does."""

    state: AdmittedState
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0


class FakeExecutor:
    """An ``Executor`` over fake KV. ``before_step`` runs first in every step: to raise, to hang, to look."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int = 3,
        before_step: Callable[[SchedulerOutput], None] = lambda plan: None,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.before_step = before_step
        self.kv: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_blocks)]
        self.host_kv: dict[int, list[int | None]] = {}
        self.held: dict[str, _Held] = {}
        self.plans: list[SchedulerOutput] = []
        self.is_closed = False

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.before_step(plan)
        self._check_plan(plan)
        self.plans.append(plan)
        for request_id in plan.released_request_ids:
            del self.held[request_id]
        for copy in plan.block_copies:
            source = (self.kv if copy.source == "device" else self.host_kv)[copy.source_block_id]
            (self.kv if copy.target == "device" else self.host_kv)[copy.target_block_id] = list(source)
        for request in plan.scheduled:
            self._admit(request)
        self._check_writes(plan.scheduled)
        return ModelRunnerOutput(
            step_id=plan.step_id, sampled={request.request_id: self._run(request) for request in plan.scheduled}
        )

    def close(self) -> None:
        self.is_closed = True

    def _check_plan(self, plan: SchedulerOutput) -> None:
        assert not self.is_closed, "used after close"
        assert plan.scheduled, "an empty batch"
        assert not self.plans or plan.step_id > self.plans[-1].step_id, "steps out of order"
        assert plan.num_tokens <= self.config.max_num_batched_tokens, "token budget"
        assert len(plan.scheduled) <= self.config.max_num_seqs, "batch size"
        ids = [request.request_id for request in plan.scheduled]
        assert len(set(ids)) == len(ids), "a request twice in a plan"

    def _admit(self, request: ScheduledRequest) -> None:
        if request.admitted is not None:
            assert request.request_id not in self.held, f"{request.request_id} is held already"
            held = _Held(request.admitted, list(request.admitted.token_ids))
            held.num_computed_tokens = request.num_computed_tokens
            self.held[request.request_id] = held
        held = self.held[request.request_id]
        held.block_table.extend(request.new_block_ids)
        assert all(0 <= block_id < self.config.num_blocks for block_id in request.new_block_ids), "block id"
        assert len(set(held.block_table)) == len(held.block_table), "a block twice in a table"
        start, end = request.num_computed_tokens, request.num_computed_tokens + len(request.token_ids)
        assert start == held.num_computed_tokens, f"{request.request_id} goes on at {start}, not where it stood"
        assert request.token_ids, "nothing to compute"
        assert end <= len(held.block_table) * self.config.block_size, "positions beyond the block table"
        assert end <= self.config.max_model_len, "positions beyond the context"
        known = held.token_ids[start:end]
        assert list(request.token_ids[: len(known)]) == known, "token ids differ from the known ones"
        num_drafts = len(request.token_ids) - len(known)
        assert not num_drafts or request.num_samples == num_drafts + 1, "drafts without samples"
        assert not request.num_samples or end >= len(held.token_ids), "samples before the known end"
        assert request.pooling is None or (end == len(held.token_ids) and not request.num_logits), "pools too early"
        assert 0 <= request.num_samples <= request.num_logits <= len(request.token_ids), "rows"

    def _check_writes(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """A block that is written stands in nobody else's table, but of one who joins a step that fills all of it."""
        size = self.config.block_size
        writers = {
            block_id: (request.request_id, index, request.num_computed_tokens + len(request.token_ids))
            for request in scheduled
            for index, block_id in enumerate(self.held[request.request_id].block_table)
            if request.num_computed_tokens < (index + 1) * size
        }
        joining = {request.request_id for request in scheduled if request.admitted is not None}
        for request_id, held in self.held.items():
            for index, block_id in enumerate(held.block_table):
                writer, index_there, end = writers.get(block_id, (request_id, index, 0))
                if writer != request_id:
                    assert request_id in joining, f"{request_id} reads block {block_id}, which {writer} writes"
                    assert index_there == index, f"{request_id} and {writer} hold block {block_id} at other places"
                    assert end >= (index + 1) * size <= held.num_computed_tokens, f"block {block_id} is not filled"

    def _run(self, request: ScheduledRequest) -> SampledTokens:
        held = self.held[request.request_id]
        start = request.num_computed_tokens
        for position, token_id in enumerate(request.token_ids, start=start):
            self._write(held, position, slot_value(self._read(held, position), token_id, held.state.adapter))
        end = start + len(request.token_ids)
        scores = [
            score(self._read(held, position + 1), held.token_ids[position + 1])
            for position in range(end - request.num_logits, end - request.num_samples)
        ]
        token_ids, logprobs = self._sample(held, request, end - request.num_samples)
        held.num_computed_tokens = end - (request.num_samples - len(token_ids))
        pooled = pool(self._read(held, end), request.pooling) if request.pooling is not None else b""
        return SampledTokens(tuple(token_ids), tuple(logprobs), tuple(scores), pooled=pooled)

    def _sample(self, held: _Held, request: ScheduledRequest, first: int) -> tuple[list[int], list[TokenLogprobs]]:
        sampling, token_ids, logprobs = held.state.sampling, list[int](), list[TokenLogprobs]()
        for position in range(first, first + request.num_samples):
            prefix = self._read(held, position + 1)
            token_id = choose(prefix, sampling, position + 1 - held.state.num_prompt_tokens, self.vocab_size)
            token_ids.append(token_id)
            held.token_ids.append(token_id)
            if sampling.logprobs is not None:
                logprobs.append(score(prefix, token_id))
            drafts = request.token_ids[position + 1 - request.num_computed_tokens :]
            if not drafts or drafts[0] != token_id:
                break
        return token_ids, logprobs

    def _read(self, held: _Held, num_tokens: int) -> list[int]:
        size = self.config.block_size
        values = [self.kv[held.block_table[position // size]][position % size] for position in range(num_tokens)]
        assert None not in values, "KV that was never written"
        return [value for value in values if value is not None]

    def _write(self, held: _Held, position: int, value: int) -> None:
        size = self.config.block_size
        self.kv[held.block_table[position // size]][position % size] = value
