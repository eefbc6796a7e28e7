"""The operations of ``kernels/plain.py`` in one pass each: ``fused.h`` called by ctypes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoserve.model.kernels.base import LayerParts, Stack
from nanoserve.model.kernels.native import stack
from nanoserve.model.kernels.native.dispatch import Library
from nanoserve.model.parallel import Collective


class NativeKernels:
    """float32 or bfloat16 rows whose size is a multiple of 16."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._norm = library.bind("ns_add_rms_norm", "lpppfpll")
        self._silu_and_mul = library.bind("ns_silu_and_mul", "lppll")
        self._weighted_sum = {
            torch.bfloat16: library.bind("ns_weighted_sum_bf16", "ppplllp"),
            torch.float32: library.bind("ns_weighted_sum_float", "ppplllp"),
        }

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        return self._normed(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous(), "the sum is written in place"
        return self._normed(x, delta.contiguous().data_ptr(), weight, eps)

    def _normed(self, x: Tensor, delta: int | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        rows, size = x.shape
        is_bf16 = x.dtype == torch.bfloat16
        self._norm(is_bf16, x.data_ptr(), delta, weight.data_ptr(), eps, out.data_ptr(), rows, size)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, merged_size = gate_up.shape
        out = torch.empty(rows, merged_size // 2, dtype=gate_up.dtype)
        is_bf16 = gate_up.dtype == torch.bfloat16
        self._silu_and_mul(is_bf16, gate_up.data_ptr(), out.data_ptr(), rows, merged_size // 2)
        return out

    def weighted_sum(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        rows, places, weights = rows.contiguous(), places.contiguous(), weights.contiguous()
        assert places.shape == weights.shape, f"{tuple(places.shape)} places but {tuple(weights.shape)} weights"
        assert (places.dtype, weights.dtype) == (torch.int64, torch.float32), f"{places.dtype}, {weights.dtype}"
        out = torch.empty(len(places), rows.shape[1], dtype=rows.dtype)
        self._weighted_sum[rows.dtype](
            rows.data_ptr(), places.data_ptr(), weights.data_ptr(), *places.shape, rows.shape[1], out.data_ptr()
        )
        return out

    def fuse(self, layers: Sequence[LayerParts], backend: object, collective: Collective) -> Stack | None:
        return stack.fuse(self._library, layers, backend, collective)
