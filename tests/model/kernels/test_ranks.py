"""Sums through shared memory: several ranks as threads of this process, each with its own end."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve.core.errors import ShardLostError
from nanoserve.model.kernels.native import library, why_not
from nanoserve.model.parallel.shared_memory import SharedMemory

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())

SIZES = (1, 15, 16, 100_003, (1 << 20) // 4 + 5)  # the last is more than a slot of float32


def ranks(size: int) -> list[SharedMemory]:
    native = library()
    assert native is not None
    file = SharedMemory.create(native, size)
    try:
        return [SharedMemory(native, file, rank, size) for rank in range(size)]
    finally:
        os.close(file)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def together(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [future.result(60) for future in [pool.submit(call) for call in calls]]


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """float32 sums one rank after another, rounded once: what the kernel promises, to the last bit."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_same_sum(pool: ThreadPoolExecutor, size: int, dtype: torch.dtype) -> None:
    ends = ranks(size)
    torch.manual_seed(1)
    many = [[torch.randn(count).to(dtype) for _ in ends] for count in SIZES]

    def work(rank: int) -> list[Tensor]:
        return [ends[rank].sum(parts[rank].clone()) for parts in many]

    for sums in together(pool, [partial(work, rank) for rank in range(size)]):
        assert all(torch.equal(found, in_order(parts)) for found, parts in zip(sums, many, strict=True))


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (7, 11), (3, 200_000)])
def test_the_first_rank_gets_the_parts_side_by_side(pool: ThreadPoolExecutor, rows: int, columns: int) -> None:
    ends = ranks(3)
    parts = [torch.randn(rows, columns) for _ in ends]
    joined = together(pool, [partial(end.join, part) for end, part in zip(ends, parts, strict=True)])
    assert torch.equal(joined[0], torch.cat(parts, dim=1))
    assert all(other.shape == joined[0].shape for other in joined)


def test_sums_and_joins_that_follow_each_other_do_not_mix(pool: ThreadPoolExecutor) -> None:
    """Slots are used again: a rank that runs ahead must not write what a slow one still reads."""
    ends = ranks(3)

    def work(rank: int) -> list[float]:
        found = []
        for turn in range(300):
            if rank == turn % 3:
                threading.Event().wait(0.0005)
            found.append(float(ends[rank].sum(torch.full((40,), float(turn * (rank + 1))))[39]))
            if turn % 7 == 0:
                ends[rank].join(torch.ones(2, 5))
        return found

    for found in together(pool, [partial(work, rank) for rank in range(3)]):
        assert found == [6.0 * turn for turn in range(300)]


def test_a_rank_that_waits_is_woken_when_the_ranks_part(pool: ThreadPoolExecutor) -> None:
    first, second = ranks(2)
    waiting = pool.submit(lambda: first.sum(torch.ones(8)))
    assert not waiting.done()
    second.abort()
    with pytest.raises(ShardLostError):
        waiting.result(10)
    with pytest.raises(ShardLostError):
        second.sum(torch.ones(8))
