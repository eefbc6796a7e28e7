"""The owner of sequences and queues: commits what the policy decides and accounts for what the executor computed.

Invariant: ``schedule`` and ``update`` alternate, and a sequence holds blocks exactly while it is running. Everything is
deterministic: the same calls, clock readings and results give the same plans.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Indexable

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.errors import DeadlineError, InvalidRequestError
from nanoserve.core.hashing import BlockHash
from nanoserve.core.outputs import FinishReason, RequestOutput, StepStats
from nanoserve.core.plan import (
    BlockCopy,
    ModelRunnerOutput,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
)
from nanoserve.core.request import GenerateRequest
from nanoserve.scheduler.accounting import append, append_verified, take_scores
from nanoserve.scheduler.admission import QueueBounds, max_length, validate
from nanoserve.scheduler.deadlines import Deadlines
from nanoserve.scheduler.drafts import Drafter, spare_rows
from nanoserve.scheduler.kv_cache_manager import KVCacheManager, Promise
from nanoserve.scheduler.policy import Decision, Limits, Waiting, plan_step
from nanoserve.scheduler.ranked import RankedSequences
from nanoserve.scheduler.sequence import Sequence, root_node

_Probe = tuple[Sequence, list[int], list[Promise]]
_NOTHING = SampledTokens()


class Scheduler:
    """Owns every open sequence, the two orders they stand in, and through the KV manager their blocks.

    One thread calls it; ``validate`` and ``check_queue`` may be called from any. Deadlines are readings of ``clock``.
    """

    def __init__(self, config: SchedulerConfig, *, cache_salt: str = "", clock: Callable[[], float] = time.time):
        self._config = config
        self._block_size = config.block_size
        self._cache_salt = cache_salt
        self._clock = clock
        self._limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
        )
        self._kv = KVCacheManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._bounds = QueueBounds(config, clock)
        self._deadlines = Deadlines()
        self._sequences: dict[str, Sequence] = {}
        self._running = RankedSequences()
        self._waiting = RankedSequences()
        self._in_flight: list[Sequence] = []
        self._ended: list[RequestOutput] = []
        self._released_request_ids: list[str] = []
        self._block_copies: list[BlockCopy] = []
        self._step_id = 0
        self._num_arrived = 0
        self._num_waiting_tokens = 0
        self._num_scheduled_tokens = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_preemptions = 0
        self._num_finished = 0
        self._num_aborted = 0
        self._queue_times_s: list[float] = []
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0

    # Coming and going

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do: open requests, or the news of some that ended between steps."""
        return bool(self._sequences or self._ended)

    def validate(self, request: GenerateRequest) -> None:
        """Raise InvalidRequestError when the request can never fit the context or the pool."""
        validate(request, self._config)

    def check_queue(self, request: GenerateRequest, *, num_inbound: int = 0, num_inbound_tokens: int = 0) -> None:
        """Raise QueueFullError when the waiting queue, and those on their way into it, leave no room."""
        self._bounds.check(
            len(request.prompt_token_ids),
            num_ahead=len(self._waiting) + num_inbound,
            num_tokens_ahead=self._num_waiting_tokens + num_inbound_tokens,
        )

    def add(self, request: GenerateRequest) -> None:
        """Take the request into the waiting queue.

        Raises:
            InvalidRequestError: it can never fit, or its id is in use.
            QueueFullError: the queue's bounds are reached.
        """
        self.validate(request)
        if request.request_id in self._sequences:
            raise InvalidRequestError(
                f"`request_id` must be unique among open requests. Given: {request.request_id!r}.", param="request_id"
            )
        self.check_queue(request)
        self.enqueue(request)

    def enqueue(self, request: GenerateRequest) -> None:
        """Take a request that passed the checks of ``add``."""
        self._num_arrived += 1
        sequence = Sequence(
            request,
            rank=(request.priority, self._num_arrived),
            max_length=max_length(request, self._config),
            root=root_node(self._cache_salt, request.adapter or "", request.cache_salt),
        )
        if not sequence.num_target_tokens:
            self._num_finished += 1
            self._ended.append(RequestOutput(sequence.request_id, finish_reason=FinishReason.LENGTH))
            return
        self._sequences[sequence.request_id] = sequence
        self._deadlines.add(sequence, self._sequences)
        self._join_queue(sequence)

    def abort(self, request_id: str) -> None:
        """End the request, in whatever state; its blocks are free at once. An unknown id is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._num_aborted += 1
            self._end_early(sequence, FinishReason.ABORT)

    def propose(self, request_id: str, draft_token_ids: Indexable[int]) -> None:
        """Let the next step verify these guesses of a decoding request's next tokens, as far as there is room."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.is_decoding:
            num_drafts = max(0, sequence.max_length - len(sequence.token_ids) - 1)
            sequence.draft_token_ids = tuple(draft_token_ids[:num_drafts])
            sequence.num_draft_tokens = len(sequence.draft_token_ids)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Let the executor copy blocks before it computes the next step."""
        self._block_copies.extend(copies)

    # A step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and take the blocks for it."""
        assert not self._in_flight, f"step {self._step_id} was not accounted for"
        self._end_late()
        if self._config.num_speculative_tokens:
            self._guess()
        probes: list[_Probe] = []
        decision = plan_step(
            self._running.items,
            self._candidates(probes),
            self._kv.releases(reversed(self._running)),
            num_free_blocks=self._kv.num_free_blocks,
            limits=self._limits,
        )
        self._num_scheduled_tokens += sum(decision.grants) + sum(decision.admissions)
        scheduled = self._commit(decision, probes)
        assert scheduled or not self._sequences, f"nothing progresses: {self._describe()}"
        self._step_id += 1
        return self._plan(scheduled)

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> tuple[RequestOutput, ...]:
        """Account for the step last scheduled: news of every request that got tokens or ended since the last one."""
        assert plan.step_id == result.step_id == self._step_id, f"result {result.step_id} for step {self._step_id}"
        outputs, self._ended = self._ended, []
        in_flight, self._in_flight = self._in_flight, []
        sampled = result.sampled
        for sequence, request in zip(in_flight, plan.scheduled, strict=True):
            if sequence.is_running:  # else it was aborted while the step ran
                output = self._account(sequence, request, sampled.get(request.request_id, _NOTHING))
                if output is not None:
                    outputs.append(output)
        return tuple(outputs)

    def stats(self, *, schedule_s: float = 0.0, execute_s: float = 0.0, update_s: float = 0.0) -> StepStats:
        """The counts now, and what happened since the last call: scheduled tokens, block events, admissions."""
        blocks_published, blocks_evicted = self._kv.drain_events()
        num_scheduled_tokens, self._num_scheduled_tokens = self._num_scheduled_tokens, 0
        queue_times_s, self._queue_times_s = self._queue_times_s, []
        return StepStats(
            step_id=self._step_id,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._num_waiting_tokens,
            num_blocks=self._config.num_blocks,
            num_free_blocks=self._kv.num_free_blocks,
            num_cached_blocks=self._kv.num_cached_blocks,
            num_scheduled_tokens=num_scheduled_tokens,
            num_prompt_tokens_total=self._num_prompt_tokens,
            num_cached_tokens_total=self._num_cached_tokens,
            num_generated_tokens_total=self._num_generated_tokens,
            num_preemptions_total=self._num_preemptions,
            num_finished_total=self._num_finished,
            num_aborted_total=self._num_aborted,
            num_draft_tokens_total=self._num_draft_tokens,
            num_accepted_tokens_total=self._num_accepted_tokens,
            schedule_s=schedule_s,
            execute_s=execute_s,
            update_s=update_s,
            blocks_published=blocks_published,
            blocks_evicted=blocks_evicted,
            queue_times_s=tuple(queue_times_s),
        )

    def check_invariants(self) -> None:
        """Check everything that must hold between steps; costs a walk over all blocks.

        Raises:
            AssertionError: something does not hold.
        """
        running, waiting = list(self._running), list(self._waiting)
        assert {id(s) for s in running + waiting} == {id(s) for s in self._sequences.values()}, self._describe()
        assert len(running) <= self._config.max_num_seqs, self._describe()
        for group, is_running in ((running, True), (waiting, False)):
            assert group == sorted(group, key=lambda sequence: sequence.rank), self._describe()
            for sequence in group:
                assert sequence.is_running is is_running, sequence.request_id
                assert sequence.num_pending_tokens > 0, f"{sequence.request_id} has nothing to compute"
                assert bool(sequence.block_ids) is is_running, f"{sequence.request_id} holds {sequence.block_ids}"
        assert self._num_waiting_tokens == sum(len(s.request.prompt_token_ids) for s in waiting)
        self._kv.check_invariants(running)

    # Deciding and committing

    def _guess(self) -> None:
        """Propose drafts for every decoding sequence, as far as the step has room for them.

        A block taken for drafts that are refuted stays with its sequence, whose next tokens fill it.
        """
        decoding = [sequence for sequence in self._running if sequence.is_decoding]
        num_rows = sum(sequence.num_pending_tokens for sequence in self._running)
        limit = spare_rows(num_rows, len(decoding), len(self._waiting))
        for sequence in decoding if limit else ():
            if sequence.drafter is None:
                sequence.drafter = Drafter(self._config.num_speculative_tokens)
            self.propose(sequence.request_id, sequence.drafter.guess(sequence.token_ids, limit))

    def _plan(self, scheduled: list[ScheduledRequest]) -> SchedulerOutput:
        """The step as a value. An empty step is not executed, so what goes with a step waits for the next one."""
        if not scheduled:
            return SchedulerOutput(step_id=self._step_id, scheduled=())
        plan = SchedulerOutput(
            step_id=self._step_id,
            scheduled=tuple(scheduled),
            released_request_ids=tuple(self._released_request_ids),
            block_copies=tuple(self._block_copies),
        )
        self._released_request_ids.clear()
        self._block_copies.clear()
        return plan

    def _candidates(self, probes: list[_Probe]) -> Iterator[Waiting]:
        """The counts of the waiting queue, head first, each with the prefix hits that it would get now.

        The policy asks for one only while it has tokens left, so whoever runs or was asked for before it computes all
        its known tokens in this step: those are hits too.
        """
        promised: dict[BlockHash, Promise] = {}
        for sequence in self._running:
            if sequence.num_pending_tokens > 1:
                self._kv.promise(sequence, sequence.num_published, promised)
        for sequence in self._waiting:
            hits = self._kv.find_hits(sequence)
            joined = self._kv.find_promised(sequence, len(hits), promised)
            probes.append((sequence, hits, joined))
            num_hits = len(hits) + len(joined)
            yield Waiting(
                sequence.num_target_tokens - num_hits * self._block_size,
                self._kv.num_blocks_taken(sequence, hits) - len(joined),
            )
            self._kv.promise(sequence, num_hits, promised)

    def _commit(self, decision: Decision, probes: list[_Probe]) -> list[ScheduledRequest]:
        """Preempt, adopt every hit, then take fresh blocks. Decodes come first in the plan."""
        for _ in range(decision.num_preempted):
            self._preempt(self._running.pop_last())
        admitted = probes[: len(decision.admissions)]
        for sequence, hits, _ in admitted:
            self._kv.adopt(sequence, hits)
        scheduled = self._share_decodes(decision.grants)
        for sequence, num_tokens in zip(self._running, decision.grants, strict=False):
            if num_tokens and not sequence.is_decoding:
                scheduled.append(self._share(sequence, num_tokens))
        for (sequence, _, joined), num_tokens in zip(admitted, decision.admissions, strict=True):
            self._kv.join(sequence, joined)
            self._admit(sequence)
            scheduled.append(self._share(sequence, num_tokens, is_new=True))
        return scheduled

    def _share_decodes(self, grants: Indexable[int]) -> list[ScheduledRequest]:
        """The plan's part for requests that go on from a sampled token; a hot loop, so it is written out."""
        scheduled: list[ScheduledRequest] = []
        in_flight = self._in_flight
        for sequence, num_tokens in zip(self._running, grants, strict=False):
            if not num_tokens or not sequence.is_decoding:
                continue
            if num_tokens > 1:
                scheduled.append(self._share(sequence, num_tokens))
                continue
            if sequence.num_draft_tokens:
                sequence.clear_drafts()
            position = sequence.num_computed_tokens
            new_block_ids = self._kv.grow(sequence, position + 1) if position >= sequence.num_slots else ()
            token_ids = (sequence.token_ids[-1],)
            scheduled.append(ScheduledRequest(sequence.request_id, token_ids, position, new_block_ids, 1, 1))
            in_flight.append(sequence)
        return scheduled

    def _share(self, sequence: Sequence, num_tokens: int, *, is_new: bool = False) -> ScheduledRequest:
        """The plan's part for any request: a chunk of what is known, drafts behind it, and the rows that matter."""
        start = sequence.num_computed_tokens
        end = start + num_tokens
        num_pending = sequence.num_pending_tokens
        num_drafts = max(0, num_tokens - num_pending)
        new_block_ids = self._kv.grow(sequence, max(end, sequence.num_target_tokens))
        num_samples = num_drafts + 1 if num_tokens >= num_pending and sequence.samples else 0
        num_scored = end - max(start, sequence.num_scored_tokens) if sequence.num_unscored_tokens else 0
        token_ids = (*sequence.token_ids[start : end - num_drafts], *sequence.draft_token_ids[:num_drafts])
        sequence.clear_drafts()
        self._in_flight.append(sequence)
        return ScheduledRequest(
            request_id=sequence.request_id,
            token_ids=token_ids,
            num_computed_tokens=start,
            new_block_ids=tuple(sequence.block_ids) if is_new else new_block_ids,
            num_logits=max(num_samples, num_scored),
            num_samples=num_samples,
            admitted=sequence.admitted_state() if is_new else None,
            pooling=sequence.request.pooling if num_tokens >= num_pending else None,
        )

    def _admit(self, sequence: Sequence) -> None:
        self._leave_queue(sequence)
        self._running.add(sequence)
        sequence.is_running = True
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self._num_prompt_tokens += sequence.num_prompt_tokens
            self._num_cached_tokens += sequence.num_cached_tokens
            self._bounds.record(len(sequence.request.prompt_token_ids))
            if sequence.request.arrival_s:
                self._queue_times_s.append(max(0.0, self._clock() - sequence.request.arrival_s))

    def _preempt(self, sequence: Sequence) -> None:
        """Back into the queue at its old rank; what it computed is lost, but for what the prefix cache keeps."""
        self._kv.release(sequence)
        sequence.is_running = False
        self._released_request_ids.append(sequence.request_id)
        self._join_queue(sequence)
        self._num_preemptions += 1

    def _join_queue(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        self._num_waiting_tokens += len(sequence.request.prompt_token_ids)

    def _leave_queue(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._num_waiting_tokens -= len(sequence.request.prompt_token_ids)

    # Accounting and ending

    def _account(self, sequence: Sequence, request: ScheduledRequest, sampled: SampledTokens) -> RequestOutput | None:
        """Advance one sequence by its share of the step; its news, if there are any. Hot: once a request and step."""
        if sampled.error is not None:
            return self._fail(sequence, sampled.error)
        token_ids = sampled.token_ids
        sequence.num_computed_tokens += len(request.token_ids)
        if len(token_ids) == request.num_samples == 1:
            sequence.is_decoding = True
            finish_reason = append(sequence, token_ids[0])
        elif request.num_samples:
            token_ids, finish_reason = append_verified(sequence, request, token_ids)
            self._learn(sequence, request.num_samples - 1, len(sampled.token_ids) - 1)
        else:
            assert not token_ids, f"{token_ids} sampled although none was planned: {request}"
            assert bool(sampled.pooled) is (request.pooling is not None), (
                f"{len(sampled.pooled)} bytes pooled: {request}"
            )
            finish_reason = None if sequence.num_pending_tokens else FinishReason.LENGTH
        scores = take_scores(sequence, request, sampled) if request.num_logits > request.num_samples else ()
        if sequence.num_computed_tokens >= (sequence.num_published + 1) * self._block_size:
            self._kv.publish(sequence)
        if finish_reason is not None:
            self._num_finished += 1
            self._close(sequence)
        elif not token_ids and not scores:
            return None
        self._num_generated_tokens += len(token_ids)
        stop_token_id = token_ids[-1] if finish_reason is FinishReason.STOP else None
        logprobs = sampled.logprobs and sampled.logprobs[: len(token_ids)]
        return RequestOutput(
            sequence.request_id,
            token_ids,
            finish_reason,
            stop_token_id,
            logprobs,
            scores,
            sequence.num_cached_tokens,
            None,
            sampled.pooled,
        )

    def _learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self._num_draft_tokens += num_drafts
        self._num_accepted_tokens += num_accepted
        if sequence.drafter is not None:
            sequence.drafter.learn(num_drafts, num_accepted, len(sequence.token_ids))

    def _fail(self, sequence: Sequence, error: tuple[str, str]) -> RequestOutput:
        self._num_finished += 1
        self._close(sequence)
        return RequestOutput(sequence.request_id, finish_reason=FinishReason.ERROR, error=error)

    def _end_late(self) -> None:
        for sequence in self._deadlines.pop_late(self._clock(), self._sequences):
            message = f"The request's deadline passed after {sequence.num_output_tokens} generated tokens."
            self._end_early(sequence, FinishReason.ERROR, error=(DeadlineError.type, message))

    def _end_early(self, sequence: Sequence, finish_reason: FinishReason, error: tuple[str, str] | None = None) -> None:
        """End a sequence between steps; the next ``update`` tells."""
        self._close(sequence)
        self._ended.append(
            RequestOutput(
                request_id=sequence.request_id,
                finish_reason=finish_reason,
                num_cached_tokens=max(0, sequence.num_cached_tokens),
                error=error,
            )
        )

    def _close(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        del self._sequences[sequence.request_id]
        if not sequence.is_running:
            self._leave_queue(sequence)
            return
        self._running.remove(sequence)
        self._kv.release(sequence)
        sequence.is_running = False
        self._released_request_ids.append(sequence.request_id)

    def _describe(self) -> str:
        running = [f"{s.request_id}:{s.num_computed_tokens}/{s.num_target_tokens}" for s in self._running]
        waiting = [f"{s.request_id}:{s.num_target_tokens}" for s in self._waiting]
        return f"running={running} waiting={waiting} free_blocks={self._kv.num_free_blocks}"
