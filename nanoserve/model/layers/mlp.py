"""The gated feed-forward layer (SwiGLU, Shazeer 2020)."""

import torch
from torch import Tensor

from nanoserve.model.kernels.base import Kernels
from nanoserve.model.layers.linear import Linear
from nanoserve.model.quant.base import LinearMethod
from nanoserve.model.share import WHOLE, Share
from nanoserve.model.slots import Slots


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up merged."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype,
        method: LinearMethod,
        kernels: Kernels,
        share: Share = WHOLE,
    ) -> None:
        """``share``: what ``intermediate_size`` is of the whole layer; the result is an addend then."""
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        rows = dict.fromkeys(parts, share)
        down = {"down_proj": hidden_size}
        self._silu_and_mul = kernels.silu_and_mul
        self.gate_up_proj = Linear(hidden_size, parts, bias=False, dtype=dtype, method=method, rows=rows)
        self.down_proj = Linear(intermediate_size, down, bias=False, dtype=dtype, method=method, columns=share)

    def slots(self, prefix: str) -> Slots:
        return self.gate_up_proj.slots(prefix) | self.down_proj.slots(prefix)

    def prepare(self) -> None:
        self.gate_up_proj.prepare()
        self.down_proj.prepare()

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        return self.down_proj(self._silu_and_mul(self.gate_up_proj(x)))
