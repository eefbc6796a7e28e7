"""Copies of blocks: inside a pool, into another, and what is refused."""

import pytest
import torch

from nanoserve.model.kernels.triton.blocks import copy_blocks, runs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
def test_blocks_arrive_bit_for_bit(dtype: torch.dtype) -> None:
    source = torch.randint(0, 250, (6, 2, 3, 517), dtype=torch.int32).to(dtype)
    target = torch.zeros(9, 2, 3, 517, dtype=dtype)
    copy_blocks(source, target, [(5, 0), (0, 8), (1, 2)])
    assert torch.equal(target[[0, 8, 2]], source[[5, 0, 1]])
    assert not target[[1, 3, 4, 5, 6, 7]].any()
    copy_blocks(target, target, [(8, 3)])
    assert torch.equal(target[3], source[0])


def test_neighbours_travel_together() -> None:
    pairs = [(4, 7), (5, 8), (6, 9), (7, 3), (1, 4), (2, 6)]
    assert list(runs(pairs)) == [(4, 7, 3), (7, 3, 1), (1, 4, 1), (2, 6, 1)]


@pytest.mark.parametrize("pair", [(6, 0), (0, 6), (-1, 0), (0, -1)])
def test_a_block_outside_its_pool_is_refused(pair: tuple[int, int]) -> None:
    pool = torch.zeros(6, 8)
    with pytest.raises(IndexError):
        copy_blocks(pool, pool, [pair])
