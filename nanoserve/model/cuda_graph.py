"""Decode steps as captured graphs: one graph a batch size, from token ids in to token ids out.

A step of requests that compute and sample one token each has a fixed shape once its number of rows is rounded up to a
bucket, so the whole of it, embedding to sampled token, is recorded once and replayed with one call. A graph reads and
writes :class:`_State`, whose addresses never change. It ends by moving every row on by a position and by keeping its
token where the next step looks for it, so that a step which goes on with the same requests copies nothing to the device
but new entries of block tables. Rows beyond the batch are padding: position -1, which stores nothing and sees nothing.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoserve.core.plan import ScheduledRequest
from nanoserve.model.attention.base import ForwardBatch, IntArray
from nanoserve.model.attention.triton import on_device
from nanoserve.model.kernels.triton.choose import SettingsTable, choose_tokens
from nanoserve.model.sampling_table import OFF, SamplingTable

logger = logging.getLogger(__name__)

_EARLY = 8  # rows up to which graphs are captured at start; larger ones when they are first needed
_KNOWN = -1  # in place of a token id: the one that the row's last step chose


class Graph(Protocol):
    """A recorded step."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]
"""Runs a step to warm it up, records it, and gives the record."""


class DecodeNetwork(Protocol):
    """What a step needs of an architecture."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_layers: Iterable[Tensor], metadata: object
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@runtime_checkable
class DecodeBackend(Protocol):
    """An attention backend whose decode metadata can be made on the device."""

    def prepare_decode(self, positions: Tensor, block_tables: Tensor) -> Any: ...


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows that have a graph of their own, rising: padding costs at most an eighth beyond 64 rows."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What a graph reads and writes. The last row of ``tables`` and ``last_tokens`` and of the settings is padding's.

    ``inputs`` [3, max_num_seqs] int64: of each entry of the batch its row, its token id or ``_KNOWN``, its position.
    ``tables`` [max_num_seqs + 1, max_blocks] int32 and ``last_tokens`` [max_num_seqs + 1] int64 by row.
    """

    inputs: Tensor
    tables: Tensor
    last_tokens: Tensor
    settings: SettingsTable
    chosen: Tensor


class DecodeGraphs:
    """Owns the device's copy of what decode steps depend on, and the graphs over it; called by the runner's thread.

    ``capture`` None runs every step eagerly. ``table`` is the runner's sampling table, which is mirrored here.
    """

    def __init__(
        self,
        network: DecodeNetwork,
        backend: DecodeBackend,
        kv_layers: Sequence[Tensor],
        table: SamplingTable,
        *,
        max_num_seqs: int,
        max_blocks: int,
        capture: Capture | None,
    ) -> None:
        self._network, self._backend, self._layers, self._table = network, backend, kv_layers, table
        self._capture = capture
        self._buckets = buckets(max_num_seqs)
        self._graphs: dict[int, Graph] = {}
        self._device = kv_layers[0].device
        self._padding = max_num_seqs
        self._tables: IntArray = np.zeros((max_num_seqs + 1, max_blocks), dtype=np.int64)
        self._columns = {name: column.copy() for name, column in _columns(table).items()}
        self._expected: IntArray = np.zeros((2, 0), dtype=np.int64)
        self._state = self._allocate()

    def _allocate(self) -> _State:
        rows, device = self._padding, self._device
        state = _State(
            inputs=torch.empty(3, rows, dtype=torch.int64, device=device),
            tables=torch.zeros(self._tables.shape, dtype=torch.int32, device=device),
            last_tokens=torch.zeros(rows + 1, dtype=torch.int64, device=device),
            settings=SettingsTable(**{name: _padded(column).to(device) for name, column in self._columns.items()}),
            chosen=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        self._clear(state)
        return state

    def _clear(self, state: _State) -> None:
        """Makes every entry padding, so that a step changes nothing that anyone reads."""
        for part, value in zip(state.inputs, (self._padding, 0, -1), strict=True):
            part.fill_(value)
        self._expected = self._expected[:, :0]

    def takes(self, scheduled: Sequence[ScheduledRequest], rows: IntArray) -> bool:
        """Whether the step is made of single tokens that nothing but the sampling table has a say in."""
        table = self._table
        return (
            all(len(r.token_ids) == r.num_samples == r.num_logits == 1 and r.pooling is None for r in scheduled)
            and not table.is_adjusted[rows].any()
            and bool((table.num_logprobs[rows] == OFF).all())
        )

    def warm_up(self) -> None:
        """Captures the graphs of small batches, largest first so that the rest fit into its memory."""
        for size in reversed(self._buckets):
            if size <= _EARLY:
                self._graph(size)

    def run(self, batch: ForwardBatch, rows: IntArray) -> list[int]:
        """The tokens of a step that :meth:`takes` accepted, in plan order."""
        size = next(bucket for bucket in self._buckets if bucket >= len(rows))
        graph = self._graph(size)
        self._mirror(batch, rows)
        self._feed(batch, rows)
        if graph is None:
            self._step(size)
        else:
            graph.replay()
        self._expected = np.stack((rows, batch.positions.numpy() + 1))
        return self._state.chosen[: len(rows)].tolist()

    def _graph(self, size: int) -> Graph | None:
        if self._capture is None:
            return None
        if size not in self._graphs:
            self._clear(self._state)
            self._graphs[size] = self._capture(lambda: self._step(size))
            logger.info("captured the graph of %d rows", size)
        return self._graphs[size]

    def _step(self, size: int) -> None:
        """What a graph holds: everything here has shapes that depend on ``size`` alone, and waits for nothing."""
        state = self._state
        rows, tokens, positions = state.inputs[:, :size]
        token_ids = torch.where(tokens == _KNOWN, state.last_tokens[rows], tokens)
        metadata = self._backend.prepare_decode(positions, state.tables[rows])
        hidden = self._network.forward(token_ids, positions.clamp(min=0), self._layers, metadata)
        chosen = choose_tokens(self._network.logits(hidden), rows, positions + 1, state.settings)
        state.chosen[:size] = chosen
        state.last_tokens[rows] = chosen
        tokens.fill_(_KNOWN)
        positions.add_(positions >= 0)

    def _feed(self, batch: ForwardBatch, rows: IntArray) -> None:
        """Rows, tokens and positions, unless the last step left just these on the device."""
        positions = batch.positions.numpy()
        if np.array_equal(self._expected, np.stack((rows, positions))):
            return
        count = self._padding
        inputs = np.stack((np.full(count, self._padding), np.zeros(count), np.full(count, -1))).astype(np.int64)
        inputs[:, : len(rows)] = rows, batch.token_ids.numpy(), positions
        (moved,) = on_device([inputs], self._device)
        self._state.inputs.copy_(moved)

    def _mirror(self, batch: ForwardBatch, rows: IntArray) -> None:
        """Entries of block tables and columns of settings that differ from what the device holds."""
        width = batch.block_tables.shape[1]
        entry, column = np.nonzero(self._tables[rows, :width] != batch.block_tables)
        if len(entry):
            changed, blocks = rows[entry], batch.block_tables[entry, column]
            self._tables[changed, column] = blocks
            at_row, at_column, moved = on_device([changed, column, blocks], self._device)
            self._state.tables[at_row.long(), at_column.long()] = moved
        for name, values in _columns(self._table).items():
            if not np.array_equal(self._columns[name][rows], values[rows]):
                self._columns[name] = values.copy()
                getattr(self._state.settings, name).copy_(_padded(values))


def _columns(table: SamplingTable) -> dict[str, NDArray[Any]]:
    return {field.name: getattr(table, field.name) for field in fields(SettingsTable)}


def _padded(column: NDArray[Any]) -> Tensor:
    """The column and one more entry, which greedy padding reads; unsigned numbers keep their bits."""
    signed = column.view(np.int64) if column.dtype == np.uint64 else column
    return torch.from_numpy(np.append(signed, signed.dtype.type(0)))


def cuda_capture() -> Capture:
    """Captures on the current device. The graphs share one pool of memory, since only one runs at a time."""
    pool: Any = None

    def capture(step: Callable[[], None]) -> Graph:
        nonlocal pool
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # compiles kernels and sets libraries up, neither of which may happen in a capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        pool = graph.pool()
        return graph

    return capture
