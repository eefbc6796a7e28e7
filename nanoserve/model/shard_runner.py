"""A shard's half of ``ModelRunner``: the same tensors step by step, and nothing that only sampling needs."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from nanoserve.core.plan import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from nanoserve.core.pooling import PoolingKind
from nanoserve.model.attention.base import AttentionBackend, IntArray
from nanoserve.model.input_batch import InputBatch
from nanoserve.model.kv_cache import KVPool
from nanoserve.model.runner import SCORED_ROWS_AT_ONCE, Network


class ShardRunner:
    """Owns its rank's KV tensors and mirror of the batch. Its results are empty: rank 0 has them."""

    num_beats = 0

    def __init__(self, network: Network, backend: AttentionBackend, pool: KVPool, *, batch: InputBatch) -> None:
        self._network, self._backend, self._pool, self._batch = network, backend, pool, batch
        self._device = pool.layers[0].device

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """As :meth:`ModelRunner.execute`, up to the logits of this rank's share of the vocabulary."""
        for request_id in plan.released_request_ids:
            self._batch.release(request_id)
        self._pool.copy(plan.block_copies)
        if plan.scheduled:
            self._compute(plan.scheduled)
        return ModelRunnerOutput(step_id=plan.step_id)

    def _compute(self, scheduled: Sequence[ScheduledRequest]) -> None:
        for request in scheduled:
            if request.admitted is not None:
                self._batch.admit(request.request_id)
        batch = self._batch.build(scheduled, self._batch.rows(scheduled))
        metadata = self._backend.prepare(batch)
        token_ids, positions = batch.token_ids.to(self._device), batch.positions.to(self._device)
        hidden = self._network.forward(token_ids, positions, self._pool.layers, metadata)
        for rows in head_rows(scheduled, batch.query_lens):
            self._network.logits(hidden[torch.from_numpy(rows)])

    def close(self) -> None:
        """Memory goes with the object."""


def head_rows(scheduled: Sequence[ScheduledRequest], query_lens: IntArray) -> Iterator[IntArray]:
    """Rows of the hidden states of which ``ModelRunner`` takes logits, one array a call, in its order."""
    ends = query_lens.cumsum().tolist()
    shares = list(zip(scheduled, ends, strict=True))
    if sampled := [row for request, end in shares for row in range(end - request.num_samples, end)]:
        yield np.array(sampled)
    for request, end in shares:
        first, last = end - request.num_logits, end - request.num_samples
        for start in range(first, last, SCORED_ROWS_AT_ONCE):
            yield np.arange(start, min(start + SCORED_ROWS_AT_ONCE, last))
    scores = [end - 1 for request, end in shares if request.pooling and request.pooling.kind is PoolingKind.SCORE]
    if scores:
        yield np.array(scores)
