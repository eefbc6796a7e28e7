"""The native fused operations in every level against the same formulas in float64."""

import pytest
import torch
from torch import Tensor

from nanoserve.model.kernels import plain
from nanoserve.model.kernels.native import Library
from nanoserve.model.kernels.native.fused import NativeKernels

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # a rounding, relative
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(0, 16), (1, 16), (3, 48), (200, 1024), (1, 3072)], ids=str)


def random(*shape: int, dtype: torch.dtype, scale: float = 1) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def same(got: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@DTYPES
@SHAPES
def test_rms_norm(native: Library, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = random(*shape, dtype=dtype, scale=3), random(shape[1], dtype=dtype)
    before = x.clone()
    same(NativeKernels(native).rms_norm(x, weight, 1e-6), plain.rms_norm(x.double(), weight.double(), 1e-6))
    assert torch.equal(x, before)


@DTYPES
@SHAPES
def test_a_norm_after_adding_sees_the_rounded_sum(native: Library, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, delta, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype, scale=2), random(shape[1], dtype=dtype)
    total = x + delta
    normed = NativeKernels(native).add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(x, total)
    same(normed, plain.rms_norm(total.double(), weight.double(), 1e-6))


@DTYPES
@SHAPES
def test_silu_and_mul(native: Library, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype, scale=8)
    same(NativeKernels(native).silu_and_mul(gate_up), plain.silu_and_mul(gate_up.double()))


@DTYPES
def test_silu_of_extreme_values(native: Library, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30] * 2, dtype=dtype)
    gate_up = torch.cat((gate, torch.ones(16, dtype=dtype)))[None]
    exact = plain.silu_and_mul(gate_up.double())
    torch.testing.assert_close(NativeKernels(native).silu_and_mul(gate_up).double(), exact, rtol=2**-7, atol=1e-6)


@DTYPES
def test_nan_is_not_hidden(native: Library, dtype: torch.dtype) -> None:
    gate_up = torch.zeros(2, 64, dtype=dtype)
    gate_up[0, 5] = float("nan")
    got = NativeKernels(native).silu_and_mul(gate_up)
    assert got.isnan().sum() == 1
    assert got[0, 5].isnan()
