"""Norms, gates and sums of rows against float64."""

import pytest
import torch

from nanoserve.model.kernels import plain
from nanoserve.model.kernels.triton import rows
from tests.model.kernels.interpreted.close import DTYPES, assert_close, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 100])
def test_norms(dtype: torch.dtype, size: int) -> None:
    x, delta, weight = random(5, size, dtype=dtype), random(5, size, dtype=dtype), random(size, dtype=dtype)
    assert_close(rows.rms_norm(x, weight, 1e-6), plain.rms_norm(x.double(), weight.double(), 1e-6), dtype)
    stream = x.clone()
    normed = rows.add_rms_norm(stream, delta, weight, 1e-6)
    assert_close(stream, x.double() + delta.double(), dtype)
    assert_close(normed, plain.rms_norm(stream.double(), weight.double(), 1e-6), dtype)


def test_norm_of_rows_that_do_not_lie_together() -> None:
    x, weight = random(4, 96)[:, :64], random(64)
    assert_close(rows.rms_norm(x, weight, 1e-5), plain.rms_norm(x.double(), weight.double(), 1e-5), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1030])
def test_silu_and_mul(dtype: torch.dtype, size: int) -> None:
    gate_up = random(3, 2 * size, dtype=dtype) * 4
    assert_close(rows.silu_and_mul(gate_up), plain.silu_and_mul(gate_up.double()), dtype)


def test_weighted_sum() -> None:
    inner, places = random(9, 40), torch.tensor([[8, 0, 3], [3, 3, 1]])
    weights = random(2, 3)
    assert_close(rows.weighted_sum(inner, places, weights), plain.weighted_sum(inner, places, weights), torch.float32)


def test_no_rows() -> None:
    assert rows.rms_norm(random(0, 8), random(8), 1e-6).shape == (0, 8)
    assert rows.silu_and_mul(random(0, 8)).shape == (0, 4)
