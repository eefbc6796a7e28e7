"""The gated feed-forward layer (SwiGLU, Shazeer 2020)."""

import torch
from torch import Tensor

from nanoserve.model.kernels.base import Kernels
from nanoserve.model.layers.linear import Linear
from nanoserve.model.quant.base import LinearMethod


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up merged."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, dtype: torch.dtype, method: LinearMethod, kernels: Kernels
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self._silu_and_mul = kernels.silu_and_mul
        self.gate_up_proj = Linear(hidden_size, parts, bias=False, dtype=dtype, method=method)
        self.down_proj = Linear(intermediate_size, {"down_proj": hidden_size}, bias=False, dtype=dtype, method=method)

    def slots(self, prefix: str) -> dict[str, Tensor]:
        return self.gate_up_proj.slots(prefix) | self.down_proj.slots(prefix)

    def prepare(self) -> None:
        self.gate_up_proj.prepare()
        self.down_proj.prepare()

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        return self.down_proj(self._silu_and_mul(self.gate_up_proj(x)))
