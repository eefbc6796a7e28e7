"""Native products against float64, over shapes, strides and every level that this CPU has."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.model.kernels.native.dispatch import Library
from nanoserve.model.quant.native import NativeLinear

# Rounding of the result, and of the sum of in_features products relative to their size.
TOLERANCE = {torch.bfloat16: (2**-8, 2**-15), torch.float32: (2**-23, 2**-18)}

many = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def matrix(rows: int, columns: int, dtype: torch.dtype, *, padding: int = 0) -> Tensor:
    return torch.randn(rows, columns + padding).to(dtype)[:, :columns]


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    wide, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    expected = wide if bias is None else wide + bias.double()
    of_result, of_sum = TOLERANCE[y.dtype]
    assert ((y.double() - expected).abs() <= of_result * expected.abs() + of_sum * size + 1e-30).all()


@many
@given(
    rows=st.integers(0, 40),
    out_features=st.integers(1, 150),
    in_features=st.integers(1, 300),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    has_bias=st.booleans(),
    padding=st.sampled_from([0, 5]),
)
def test_a_product_is_right_for_any_shape(
    native: Library,
    rows: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    has_bias: bool,
    padding: int,
) -> None:
    torch.manual_seed(rows * 7 + out_features)
    weight = matrix(out_features, in_features, dtype, padding=padding)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    x = matrix(rows, in_features, dtype, padding=padding)
    check(NativeLinear(native, weight, bias)(x), x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_of_many_rows_in_several_slices_and_blocks_is_right(native: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = matrix(160, 1100, dtype), matrix(1000, 1100, dtype)
    check(NativeLinear(native, weight, None)(x), x, weight, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_the_same_to_the_last_bit_in_any_company(native: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = NativeLinear(native, matrix(200, 1100, dtype), None)
    x = matrix(700, 1100, dtype)
    together = linear(x)
    for start, count in ((0, 1), (5, 2), (17, 3), (40, 4), (99, 15), (300, 17), (431, 33), (5, 600)):
        assert torch.equal(linear(x[start : start + count]), together[start : start + count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_the_number_of_threads(native: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, x = NativeLinear(native, matrix(3000, 500, dtype), None), matrix(20, 500, dtype)
    before = native.bind("ns_threads", "")()
    expected = linear(x)
    native.set_threads(1)
    assert torch.equal(linear(x), expected)
    native.set_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(100, 37), (64, 128)])
def test_rows_come_back_as_they_were(native: Library, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = matrix(*shape, dtype)
    ids = torch.tensor([0, 63, 31, 32, 0, shape[0] - 1])
    linear = NativeLinear(native, weight, None)
    assert torch.equal(linear.rows(ids), weight[ids])
    assert linear.rows(ids[:0]).shape == (0, shape[1])
    with pytest.raises(AssertionError, match="outside"):
        linear.rows(torch.tensor([shape[0]]))


def test_infinities_and_nans_stay_in_their_rows(native: Library) -> None:
    weight = torch.ones(40, 70, dtype=torch.bfloat16)
    x = torch.ones(3, 70, dtype=torch.bfloat16)
    x[0, 3], x[1, 69] = torch.inf, torch.nan
    y = NativeLinear(native, weight, None)(x)
    assert (y[0] == torch.inf).all()
    assert y[1].isnan().all()
    assert (y[2] == 70).all()
