"""What surrounds captured decode steps: buckets, padding, buffers that stay in place, and copies that are not made.

No GPU: a stand-in for a graph runs its step again on replay, and checks that every buffer is where it was recorded.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve.core.plan import AdmittedState, ScheduledRequest
from nanoserve.core.pooling import PoolingKind, PoolingParams
from nanoserve.core.sampling import SamplingParams
from nanoserve.model.attention import triton
from nanoserve.model.attention.base import ForwardBatch
from nanoserve.model.sampling_table import SamplingTable

pytest.importorskip("triton", reason="triton is not installed")
from nanoserve.model import cuda_graph

MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE, VOCAB = 10, 6, 4, 1009


class Network:
    """The next token depends on token, position and the block that holds it; notes the numbers of rows."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def forward(self, token_ids: Tensor, positions: Tensor, kv_layers: Iterable[Tensor], metadata: Any) -> Tensor:
        self.sizes.append(len(token_ids))
        assert (positions >= 0).all(), "a rotary table has no entry for padding"
        blocks: Tensor = metadata
        return token_ids * 31 + positions * 7 + blocks

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Backend:
    """Metadata is the block of each row's position; padding has none. ``live`` counts the rows that store KV."""

    def __init__(self) -> None:
        self.live: list[int] = []

    def prepare_decode(self, positions: Tensor, block_tables: Tensor) -> Tensor:
        self.live.append(int((positions >= 0).sum()))
        blocks = block_tables.gather(1, (positions.clamp(min=0) // BLOCK_SIZE)[:, None])[:, 0]
        return torch.where(positions < 0, 0, blocks)


class Replays:
    """Captures as a GPU would: once to warm up and once to record; replays must find the same buffers."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, step: Callable[[], None]) -> Any:
        self.num_captures += 1
        step()
        step()
        owner = self

        class Record:
            def replay(self) -> None:
                owner.num_replays += 1
                step()

        return Record()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is moved to the device, in order."""
    moved: list[int] = []
    original = triton.on_device

    def counting(arrays: Any, device: torch.device) -> Any:
        moved.append(sum(array.size for array in arrays))
        return original(arrays, device)

    monkeypatch.setattr(cuda_graph, "on_device", counting)
    monkeypatch.setattr(cuda_graph, "choose_tokens", choose)
    return moved


def choose(logits: Tensor, rows: Tensor, positions: Tensor, table: Any) -> Tensor:
    top_k: Tensor = table.top_k
    return (logits + top_k[rows] + positions) % VOCAB


class Requests:
    """The runner's side: rows, block tables and tokens of requests, and what each must come to."""

    def __init__(self) -> None:
        self.table = SamplingTable(MAX_SEQS)
        self.blocks = np.zeros((MAX_SEQS, MAX_BLOCKS), dtype=np.int64)
        self.tokens, self.positions = [0] * MAX_SEQS, [0] * MAX_SEQS
        self._next_block = 100

    def admit(self, row: int, position: int, top_k: int) -> None:
        params = SamplingParams(top_k=top_k, seed=1)
        self.table.admit(row, AdmittedState(token_ids=(1,), num_prompt_tokens=1, sampling=params))
        self.tokens[row], self.positions[row] = 5 + row, position
        for column in range(position // BLOCK_SIZE + 1):
            self._extend(row, column)

    def _extend(self, row: int, column: int) -> None:
        self.blocks[row, column] = self._next_block
        self._next_block += 1

    def step(self, graphs: cuda_graph.DecodeGraphs, rows: list[int]) -> None:
        """Runs one step of ``rows`` and checks every token."""
        for row in rows:
            if self.positions[row] % BLOCK_SIZE == 0 and self.positions[row]:
                self._extend(row, self.positions[row] // BLOCK_SIZE)
        positions = np.array([self.positions[row] for row in rows])
        width = int(positions.max()) // BLOCK_SIZE + 1
        tables = self.blocks[rows, :width]
        batch = ForwardBatch(
            token_ids=torch.tensor([self.tokens[row] for row in rows]),
            positions=torch.from_numpy(positions),
            slot_blocks=torch.zeros(len(rows), dtype=torch.int64),
            slot_offsets=torch.zeros(len(rows), dtype=torch.int64),
            query_lens=np.ones(len(rows), dtype=np.int64),
            kv_lens=positions + 1,
            block_tables=tables,
        )
        wanted = [self._wanted(row) for row in rows]
        assert graphs.run(batch, np.array(rows)) == wanted
        for row, token in zip(rows, wanted, strict=True):
            self.tokens[row] = token
            self.positions[row] += 1

    def _wanted(self, row: int) -> int:
        position = self.positions[row]
        block = int(self.blocks[row, position // BLOCK_SIZE])
        return (self.tokens[row] * 31 + position * 7 + block + int(self.table.top_k[row]) + position + 1) % VOCAB


def graphs_for(
    requests: Requests, network: Network, capture: Any, backend: Backend | None = None
) -> cuda_graph.DecodeGraphs:
    return cuda_graph.DecodeGraphs(
        network, backend or Backend(), [torch.zeros(1)], requests.table,
        max_num_seqs=MAX_SEQS, max_blocks=MAX_BLOCKS, capture=capture,
    )  # fmt: skip


@pytest.mark.parametrize("captures", [True, False])
def test_tokens_are_right_as_requests_come_and_go(captures: bool, copies: list[int]) -> None:
    requests, network = Requests(), Network()
    graphs = graphs_for(requests, network, Replays() if captures else None)
    for row, position in enumerate([0, 3, 9, 1]):
        requests.admit(row, position, top_k=row)
    for rows in ([0, 1, 2], [0, 1, 2], [2, 0], [2, 0], [1, 2, 0, 3], [3], [3], [0, 1, 2, 3]):
        requests.step(graphs, rows)
    requests.admit(1, 2, top_k=77)  # the row's next owner
    for rows in ([0, 1, 2], [0, 1, 2]):
        requests.step(graphs, rows)


def test_batches_are_padded_to_buckets_and_captured_once(copies: list[int]) -> None:
    requests, network, replays = Requests(), Network(), Replays()
    graphs = graphs_for(requests, network, replays)
    graphs.warm_up()
    assert network.sizes == [8, 8, 4, 4, 2, 2, 1, 1]
    for row in range(9):
        requests.admit(row, 1, top_k=0)
    network.sizes.clear()
    requests.step(graphs, [4, 2, 0])
    assert (network.sizes, replays.num_captures) == ([4], 4)
    requests.step(graphs, list(range(9)))
    requests.step(graphs, list(range(9)))
    assert network.sizes == [4, 10, 10, 10, 10], "the largest bucket is captured when it is first needed"
    assert (replays.num_captures, replays.num_replays) == (5, 3)


def test_padding_stores_nothing_however_long_a_batch_stays(copies: list[int]) -> None:
    """A row of padding that came to life would write over block 0, whoever holds it."""
    requests, backend = Requests(), Backend()
    graphs = graphs_for(requests, Network(), Replays(), backend)
    for row in range(7):
        requests.admit(row, 1, top_k=0)
    for _ in range(3):
        requests.step(graphs, [0, 1, 2])
    requests.step(graphs, list(range(7)))
    assert backend.live == [0, 0, 3, 3, 3, 0, 0, 7], "two steps of each capture, then those of the batch"


def test_a_steady_step_copies_new_entries_of_block_tables_and_nothing_else(copies: list[int]) -> None:
    requests = Requests()
    graphs = graphs_for(requests, Network(), Replays())
    for row in range(3):
        requests.admit(row, row, top_k=0)
    requests.step(graphs, [0, 1, 2])
    copies.clear()
    moved = []
    for _ in range(6):
        requests.step(graphs, [0, 1, 2])
        moved.append(sum(copies))
        copies.clear()
    # Positions 1 2 3, 2 3 4, ...: whoever enters a block of four gets one; row, place and block id are three numbers.
    assert moved == [0, 3, 3, 3, 0, 3]


def test_what_a_graph_does_not_hold_is_left_to_the_runner() -> None:
    requests = Requests()
    graphs = graphs_for(requests, Network(), None)
    rows = np.array([0])

    def takes(**overrides: Any) -> bool:
        given: dict[str, Any] = {"token_ids": (1,), "num_logits": 1, "num_samples": 1} | overrides
        return graphs.takes([ScheduledRequest(request_id="a", num_computed_tokens=4, **given)], rows)

    requests.admit(0, 4, top_k=0)
    assert takes()
    assert not takes(token_ids=(1, 2))
    assert not takes(num_samples=0, num_logits=0)
    assert not takes(pooling=PoolingParams(kind=PoolingKind.EMBED))
    for field in ({"logprobs": 1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}):
        params = SamplingParams(seed=1, **field)
        requests.table.admit(0, AdmittedState(token_ids=(1,), num_prompt_tokens=1, sampling=params))
        assert not takes(), field


@pytest.mark.parametrize("most", [1, 2, 5, 64, 100, 256, 1000])
def test_buckets_reach_just_up_to_the_largest_batch(most: int) -> None:
    sizes = cuda_graph.buckets(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))
