"""How close a kernel must come to float64, and what it is fed."""

import torch
from torch import Tensor

_LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the error by that of the result
DTYPES = list(_LIMITS)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers; other numbers for another shape or seed."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator).to(dtype)


def assert_close(result: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """``result`` may differ from the float64 ``exact`` as much as its dtype allows; NaN and infinity never pass."""
    assert result.shape == exact.shape
    assert torch.isfinite(result).all()
    error = (result.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)
    assert error <= _LIMITS[dtype], f"relative error {error:.2e}"
