"""The runner's mirror of what it was told: one row a request with its block table, and the flat tensors of a step.

Only :class:`ModelRunner` writes here, from plans. Nothing is decided here.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from nanoserve.core.plan import ScheduledRequest
from nanoserve.model.attention.base import ForwardBatch, IntArray


class InputBatch:
    """Rows of requests. A request keeps its row from admission to release."""

    def __init__(self, *, max_num_seqs: int, max_blocks_per_request: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((max_num_seqs, max_blocks_per_request), dtype=np.int64)
        self._num_blocks = [0] * max_num_seqs
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]

    def admit(self, request_id: str) -> int:
        """Gives the request a row with an empty block table."""
        assert request_id not in self._row_of, f"{request_id} is admitted twice"
        row = self._free_rows.pop()
        self._row_of[request_id] = row
        self._num_blocks[row] = 0
        return row

    def release(self, request_id: str) -> int | None:
        """Forgets the request; gives the row it had, or None when it never had one (aborted while it waited)."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    def rows(self, scheduled: Sequence[ScheduledRequest]) -> IntArray:
        """The row of each scheduled request."""
        return np.array([self._row_of[request.request_id] for request in scheduled])

    def build(self, scheduled: Sequence[ScheduledRequest], rows: IntArray) -> ForwardBatch:
        """Appends the new blocks, then lays out the step flat, in plan order."""
        self._append_blocks(scheduled)
        shares = [request.token_ids for request in scheduled]
        query_lens = np.array([len(share) for share in shares])
        computed = np.array([request.num_computed_tokens for request in scheduled])
        kv_lens = computed + query_lens
        total = int(query_lens.sum())
        token_ids = np.fromiter(chain.from_iterable(shares), np.int64, total)
        shift = computed - (np.cumsum(query_lens) - query_lens)
        positions = np.arange(total) + np.repeat(shift, query_lens)
        max_blocks = -(-int(kv_lens.max()) // self._block_size)
        block, offset = np.divmod(positions, self._block_size)
        return ForwardBatch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slot_blocks=torch.from_numpy(self._tables[np.repeat(rows, query_lens), block]),
            slot_offsets=torch.from_numpy(offset),
            query_lens=query_lens,
            kv_lens=kv_lens,
            block_tables=self._tables[rows, :max_blocks],
        )

    def _append_blocks(self, scheduled: Sequence[ScheduledRequest]) -> None:
        for request in scheduled:
            if request.new_block_ids:
                row = self._row_of[request.request_id]
                first = self._num_blocks[row]
                last = first + len(request.new_block_ids)
                self._tables[row, first:last] = request.new_block_ids
                self._num_blocks[row] = last
