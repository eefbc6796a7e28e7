"""The grouped product of experts against one product an expert."""

import pytest
import torch

from nanoserve.model.kernels.triton.experts import experts_config, grouped_product
from tests.model.kernels.interpreted.close import DTYPES, assert_close, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[0, 3, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 40], [17, 16, 0, 5, 2]])
def test_rows_meet_their_own_expert(dtype: torch.dtype, counts: list[int]) -> None:
    x, weight = random(sum(counts), 40, dtype=dtype), random(5, 24, 40, dtype=dtype)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    parts = zip(x.double().split(counts), weight.double(), strict=True)
    assert_close(grouped_product(x, weight, ends), torch.cat([rows @ own.T for rows, own in parts]), dtype)


def test_no_rows() -> None:
    assert grouped_product(random(0, 8), random(2, 4, 8), torch.zeros(2, dtype=torch.int32)).shape == (0, 4)


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    assert [experts_config(n, 128).rows for n in (8, 8 * 1024, 8 * 16384)] == [16, 64, 128]
