"""Executes plans: mirrors the block tables, runs the network over the flat batch, samples, and reports tokens.

The runner decides nothing about requests; it is the only writer of the KV pool, the block-table mirror and the sampling
table. It satisfies the engine's ``Executor``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanoserve.core.plan import (
    AdmittedState,
    ModelRunnerOutput,
    SampledTokens,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from nanoserve.model.adjustments import SampleBatch
from nanoserve.model.attention.base import AttentionBackend, ForwardBatch, IntArray
from nanoserve.model.grammar import Allowed, GrammarTable
from nanoserve.model.input_batch import InputBatch
from nanoserve.model.kv_cache import KVPool
from nanoserve.model.logprobs import score
from nanoserve.model.pooling import pool
from nanoserve.model.sampler import Sampler, Samples
from nanoserve.model.sampling_table import SamplingTable

_SCORED_ROWS_AT_ONCE = 64  # prompt logprobs: 64 rows of 152k float32 logits are 39 MB


class Network(Protocol):
    """What the runner needs of an architecture. ``norm`` is the final one, which ``logits`` includes."""

    @property
    def norm(self) -> Callable[[Tensor], Tensor]: ...

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_layers: Iterable[Tensor], metadata: object
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Graphs(Protocol):
    """Runs whole steps of single tokens (``cuda_graph.py``)."""

    def takes(self, scheduled: Sequence[ScheduledRequest], rows: IntArray) -> bool: ...

    def run(self, batch: ForwardBatch, rows: IntArray) -> list[int]: ...


GraphsFactory = Callable[[SamplingTable], Graphs]


class ModelRunner:
    """Owns KV tensors and the mirror of the batch; called by one thread.

    ``num_beats`` counts the layers run so far; any thread may read it to see that a long step moves.
    """

    def __init__(
        self,
        network: Network,
        backend: AttentionBackend,
        pool: KVPool,
        *,
        batch: InputBatch,
        grammars: GrammarTable,
        max_num_seqs: int,
        graphs: GraphsFactory | None = None,
    ) -> None:
        self._network = network
        self._backend = backend
        self._pool = pool
        self._batch = batch
        self._grammars = grammars
        self._table = SamplingTable(max_num_seqs)
        self._device = pool.layers[0].device
        self._sampler = Sampler(self._table, self._device)
        self._graphs = graphs(self._table) if graphs is not None else None
        self.num_beats = 0
        self._states: dict[str, AdmittedState] = {}

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. Releases come first, then block copies, then admissions, then the computation."""
        self._release(plan.released_request_ids)
        self._pool.copy(plan.block_copies)
        if not plan.scheduled:
            return ModelRunnerOutput(step_id=plan.step_id)
        self._admit(plan.scheduled)
        rows = self._batch.rows(plan.scheduled)
        batch = self._batch.build(plan.scheduled, rows)
        if (graphs := self._graphs_for(plan.scheduled, rows)) is not None:
            tokens = graphs.run(batch, rows)
            self.num_beats += len(self._pool.layers)
            pairs = zip(plan.scheduled, tokens, strict=True)
            chosen = {request.request_id: SampledTokens(token_ids=(token,)) for request, token in pairs}
            return ModelRunnerOutput(step_id=plan.step_id, sampled=chosen)
        masks = self._grammars.begin(plan.scheduled)
        hidden = self._forward(batch)
        sampled = self._sample(plan.scheduled, rows, batch, hidden, masks)
        self._count(plan.scheduled, rows, sampled)
        self._grammars.accept(sampled)
        self._score_prompts(plan.scheduled, batch, hidden, sampled)
        sampled |= pool(plan.scheduled, batch.query_lens, hidden, norm=self._network.norm, logits=self._network.logits)
        return ModelRunnerOutput(step_id=plan.step_id, sampled=sampled)

    def close(self) -> None:
        """Forgets every request. Memory goes with the object."""
        self._release(tuple(self._states))

    def _release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._batch.release(request_id)
            self._grammars.release(request_id)
            self._states.pop(request_id, None)

    def _admit(self, scheduled: Sequence[ScheduledRequest]) -> None:
        for request in scheduled:
            if request.admitted is not None:
                row = self._batch.admit(request.request_id)
                self._states[request.request_id] = request.admitted
                self._table.admit(row, request.admitted)
                self._grammars.admit(request.request_id, request.admitted)

    def _graphs_for(self, scheduled: Sequence[ScheduledRequest], rows: IntArray) -> Graphs | None:
        """What can run the step from end to end; None where it takes more than a graph holds."""
        graphs = self._graphs
        fits = graphs is not None and graphs.takes(scheduled, rows) and not self._grammars.binds(scheduled)
        return graphs if fits else None

    def _forward(self, batch: ForwardBatch) -> Tensor:
        metadata = self._backend.prepare(batch)
        token_ids, positions = batch.token_ids.to(self._device), batch.positions.to(self._device)
        return self._network.forward(token_ids, positions, self._beating_layers(), metadata)

    def _beating_layers(self) -> Iterator[Tensor]:
        """The layers' KV, handed out one by one as the network comes to them, which shows that it moves."""
        for kv in self._pool.layers:
            self.num_beats += 1
            yield kv

    def _sample(
        self,
        scheduled: Sequence[ScheduledRequest],
        rows: IntArray,
        batch: ForwardBatch,
        hidden: Tensor,
        masks: Callable[[], Allowed | None],
    ) -> dict[str, SampledTokens]:
        counts = np.fromiter((request.num_samples for request in scheduled), np.int64, len(scheduled))
        total = int(counts.sum())
        if not total:
            return {}
        starts = np.cumsum(counts) - counts
        first = np.cumsum(batch.query_lens) - counts - starts
        places = np.arange(total) + np.repeat(first, counts)
        samples = self._sampler.sample(
            self._network.logits(hidden[torch.from_numpy(places)]),
            SampleBatch(
                rows=np.repeat(rows, counts),
                positions=batch.positions.numpy()[places] + 1,
                drafts=_drafts(scheduled, starts) if total > len(scheduled) else {},
                allowed=masks(),
            ),
        )
        return {
            request.request_id: _accept(request, samples, start)
            for request, start in zip(scheduled, starts.tolist(), strict=True)
            if request.num_samples
        }

    def _count(self, scheduled: Sequence[ScheduledRequest], rows: IntArray, sampled: dict[str, SampledTokens]) -> None:
        """Lets penalties count the tokens of this step; accepted drafts are in no later plan."""
        for index in np.flatnonzero(self._table.is_adjusted[rows]).tolist():
            if scheduled[index].num_samples:
                self._table.count(int(rows[index]), sampled[scheduled[index].request_id].token_ids)

    def _score_prompts(
        self,
        scheduled: Sequence[ScheduledRequest],
        batch: ForwardBatch,
        hidden: Tensor,
        sampled: dict[str, SampledTokens],
    ) -> None:
        """Adds prompt logprobs to ``sampled``: rows before the sampling ones score the token that follows theirs."""
        end = 0
        for request, query_len in zip(scheduled, batch.query_lens.tolist(), strict=True):
            end += query_len
            num_scored = request.num_logits - request.num_samples
            if num_scored:
                first = end - request.num_logits
                entries = self._score(request, hidden[first : first + num_scored])
                own = sampled.get(request.request_id, SampledTokens())
                sampled[request.request_id] = own._replace(prompt_logprobs=entries)

    def _score(self, request: ScheduledRequest, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        state = self._states[request.request_id]
        num_top = state.sampling.prompt_logprobs or 0
        following = request.num_computed_tokens + len(request.token_ids) - request.num_logits + 1
        targets = state.token_ids[following : following + len(hidden)]
        entries: list[TokenLogprobs] = []
        for start in range(0, len(hidden), _SCORED_ROWS_AT_ONCE):
            part = hidden[start : start + _SCORED_ROWS_AT_ONCE]
            wanted = targets[start : start + len(part)]
            entries += score(self._network.logits(part), wanted, [num_top] * len(part))
        return tuple(entries)


def _drafts(scheduled: Sequence[ScheduledRequest], starts: IntArray) -> dict[int, Sequence[int]]:
    """Sample index -> the drafts that a sample assumes to be accepted: those before it."""
    drafts: dict[int, Sequence[int]] = {}
    for request, start in zip(scheduled, starts.tolist(), strict=True):
        if request.num_samples > 1:
            proposed = request.token_ids[1 - request.num_samples :]
            drafts |= {start + i: proposed[:i] for i in range(1, request.num_samples)}
    return drafts


def _accept(request: ScheduledRequest, samples: Samples, start: int) -> SampledTokens:
    """Takes samples up to and including the first that differs from its draft: just what one by one would give."""
    if request.num_samples == 1 and not samples.logprobs:
        return SampledTokens(token_ids=(samples.token_ids[start],))
    count = 1
    drafts = request.token_ids[len(request.token_ids) - request.num_samples + 1 :]
    for draft, token in zip(drafts, samples.token_ids[start:], strict=False):
        if draft != token:
            break
        count += 1
    taken = range(start, start + count)
    logprobs = tuple(samples.logprobs[i] for i in taken) if start in samples.logprobs else ()
    return SampledTokens(token_ids=tuple(samples.token_ids[start : start + count]), logprobs=logprobs)
