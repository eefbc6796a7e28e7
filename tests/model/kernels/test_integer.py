"""Quantized weights: what they mean, the native products against it, and how much they lose."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.model.kernels.native.dispatch import Library
from nanoserve.model.quant import linear_method
from nanoserve.model.quant.integer import IntegerLinear, NativeIntegerLinear, quantize_rows

DTYPES = [torch.bfloat16, torch.float32]
many = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def check(y: Tensor, x: Tensor, linear: NativeIntegerLinear, bias: Tensor | None) -> None:
    """``y`` against the float64 product of the quantized rows and the weight that ``linear`` itself says it holds."""
    values, scales = quantize_rows(x)
    weight = linear.rows(torch.arange(y.shape[1])).double()
    expected = (values.double() * scales[:, None].double()) @ weight.T
    expected = expected if bias is None else expected + bias.double()
    size = (values.double() * scales[:, None].double()).abs() @ weight.abs().T
    # In bfloat16 each row that `rows` gives was itself rounded.
    of_result, of_size = (2**-8, 2**-9) if y.dtype == torch.bfloat16 else (2**-22, 2**-21)
    assert ((y.double() - expected).abs() <= of_result * expected.abs() + of_size * size).all()


@many
@given(
    rows=st.integers(0, 40),
    out_features=st.integers(1, 100),
    in_features=st.integers(1, 300),
    bits=st.sampled_from([8, 4]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    padding=st.sampled_from([0, 5]),
)
def test_a_product_is_right_for_any_shape(
    native: Library,
    rows: int,
    out_features: int,
    in_features: int,
    bits: int,
    dtype: torch.dtype,
    has_bias: bool,
    padding: int,
) -> None:
    torch.manual_seed(rows * 7 + out_features)
    weight = torch.randn(out_features, in_features + padding).to(dtype)[:, :in_features]
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    x = torch.randn(rows, in_features + padding).to(dtype)[:, :in_features]
    linear = NativeIntegerLinear(native, bits, weight, bias)
    check(linear(x), x, linear, bias)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_and_torch_mean_the_same(native: Library, bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(70, 300).to(dtype), torch.randn(9, 300).to(dtype) * 10
    fast, plain = NativeIntegerLinear(native, bits, weight, None), IntegerLinear(bits, weight, None)
    ids = torch.arange(70)
    assert (fast.rows(ids) != plain.rows(ids)).float().mean() < 0.001, "ties of the last bit apart, the same integers"
    assert (fast(x) - plain(x)).abs().max() <= 2**-7 * plain(x).abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_the_same_to_the_last_bit_in_any_company_and_on_any_level(native: Library, bits: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(200, 1100), torch.randn(2500, 1100)
    linear = NativeIntegerLinear(native, bits, weight, None)
    together = linear(x)
    for start, count in ((0, 1), (5, 2), (17, 3), (40, 4), (99, 5), (300, 17), (431, 33), (5, 2200)):
        assert torch.equal(linear(x[start : start + count]), together[start : start + count])
    plain = IntegerLinear(bits, weight, None)(x[:20])
    assert (together[:20] - plain).abs().max() <= 1e-4 * plain.abs().max()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.012), (4, 0.11)])
@pytest.mark.parametrize("kind", [NativeIntegerLinear, IntegerLinear])
def test_the_loss_is_that_of_the_format(native: Library, kind: type, bits: int, most: float) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(256, 1024), torch.randn(16, 1024)
    linear = kind(native, bits, weight, None) if kind is NativeIntegerLinear else kind(bits, weight, None)
    exact = x @ weight.T
    assert (linear(x) - exact).norm() < most * exact.norm()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1, 33, 64, 200])
def test_extremes_keep_their_meaning(native: Library, bits: int, size: int) -> None:
    weight = torch.zeros(5, size)
    weight[1], weight[2, 0], weight[3, -1] = 1.0, 3e38, -1e-42
    x = torch.stack([torch.zeros(size), torch.ones(size), torch.full((size,), 1e-42), torch.full((size,), torch.inf)])
    for linear in (NativeIntegerLinear(native, bits, weight, None), IntegerLinear(bits, weight, None)):
        y = linear(x)
        assert (y[0] == 0).all()
        assert y[1].tolist() == pytest.approx([0, size, 3e38, 0, 0], rel=1e-2)
        assert (y[2] == 0).all()
        assert y[3].isnan().all()


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("level", ["off", "auto"])
def test_the_method_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch, name: str, level: str) -> None:
    monkeypatch.setenv("NANOSERVE_CPU_ISA", level)
    linear = linear_method(name).prepare(torch.eye(64), torch.ones(64))
    x = torch.arange(128.0).reshape(2, 64)
    assert torch.allclose(linear(x), x + 1, atol=1)
    assert linear.rows is not None
    assert torch.allclose(linear.rows(torch.tensor([3])), torch.eye(64)[3:4])
