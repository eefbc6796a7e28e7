"""Root-mean-square norms."""

import torch
from torch import Tensor

from nanoserve.model.kernels.base import Kernels


class RMSNorm:
    """RMSNorm over the last axis; the loader fills ``weight`` [size]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, kernels: Kernels) -> None:
        self.weight = torch.empty(size, dtype=dtype)
        self._eps = eps
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def after_adding(self, x: Tensor, delta: Tensor) -> Tensor:
        """Adds ``delta`` to the residual stream ``x`` [num_tokens, size] in place; gives the norm of the sum."""
        return self._kernels.add_rms_norm(x, delta, self.weight, self._eps)
