"""All experts in one call against each expert's own product: the same bits, for any sizes and any share of rows."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.model.kernels.native.dispatch import Library
from nanoserve.model.quant.base import PreparedLinear
from nanoserve.model.quant.experts import GroupedExperts, NativeExperts, PreparedExperts, SeparateExperts
from nanoserve.model.quant.integer import NativeIntegerExperts, NativeIntegerLinear
from nanoserve.model.quant.native import NativeLinear

many = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
BITS = [16, 8, 4]
DTYPES = [torch.bfloat16, torch.float32]


def together(native: Library, bits: int, weight: Tensor) -> PreparedExperts:
    return NativeExperts(native, weight) if bits == 16 else NativeIntegerExperts(native, bits, weight)


def one(native: Library, bits: int, weight: Tensor) -> PreparedLinear:
    return NativeLinear(native, weight, None) if bits == 16 else NativeIntegerLinear(native, bits, weight, None)


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


@many
@given(
    counts=st.lists(st.integers(0, 5) | st.integers(30, 70), min_size=1, max_size=6),
    out_features=st.integers(1, 100),
    in_features=st.integers(1, 300),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
)
def test_each_row_is_multiplied_by_its_own_expert(
    native: Library, counts: list[int], out_features: int, in_features: int, bits: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(sum(counts))
    weight = torch.randn(len(counts), out_features, in_features).to(dtype)
    rows, ends = torch.randn(sum(counts), in_features).to(dtype), ends_of(counts)
    got = together(native, bits, weight)(rows, ends)
    # 4-bit products of few rows take another way, with other roundings of the last sum; the integers are the same.
    alone = [one(native, bits, part) for part in weight]
    expected = torch.cat([linear(part) for linear, part in zip(alone, rows.split(counts), strict=True)])
    assert torch.equal(got, expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_company(native: Library, bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(3, 64, 200).to(dtype), torch.randn(90, 200).to(dtype)
    experts = together(native, bits, weight)
    whole = experts(rows, ends_of([60, 0, 30]))
    alone = [experts(row[None], ends_of([1, 0, 0] if i < 60 else [0, 0, 1])) for i, row in enumerate(rows)]
    assert torch.equal(whole, torch.cat(alone))


def test_full_precision_equals_torch(native: Library) -> None:
    torch.manual_seed(0)
    weight, rows, ends = torch.randn(4, 48, 96), torch.randn(50, 96), ends_of([1, 0, 40, 9])
    torch.testing.assert_close(
        NativeExperts(native, weight)(rows, ends), GroupedExperts(weight)(rows, ends), rtol=1e-5, atol=1e-4
    )


def test_separate_experts_equal_those_in_one_call(native: Library) -> None:
    torch.manual_seed(0)
    weight, rows, ends = torch.randn(4, 48, 96), torch.randn(50, 96), ends_of([1, 0, 40, 9])
    separate = SeparateExperts([NativeLinear(native, part, None) for part in weight])
    assert torch.equal(separate(rows, ends), NativeExperts(native, weight)(rows, ends))


def test_rows_beyond_the_last_end_are_a_fault_of_the_caller(native: Library) -> None:
    experts = NativeExperts(native, torch.randn(2, 32, 32))
    with pytest.raises(AssertionError, match="last rows end at 3 of 4"):
        experts(torch.randn(4, 32), ends_of([1, 2]))


@pytest.mark.parametrize("bits", BITS)
def test_no_rows_at_all(native: Library, bits: int) -> None:
    experts = together(native, bits, torch.randn(2, 32, 64))
    assert experts(torch.empty(0, 64), ends_of([0, 0])).shape == (0, 32)
