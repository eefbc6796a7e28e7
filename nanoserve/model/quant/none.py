"""Weights as they come: packed for the native kernels; without those in oneDNN's order, or a plain matrix."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.model.kernels.native import library
from nanoserve.model.kernels.triton import why_not
from nanoserve.model.quant.base import PreparedLinear
from nanoserve.model.quant.experts import GroupedExperts, NativeExperts, PreparedExperts, TritonExperts
from nanoserve.model.quant.native import NativeLinear


class _PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.weight_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._weight)


class _PackedLinear:
    """A bfloat16 weight in oneDNN's blocked order, which a product of few rows reads without reordering.

    On a CPU with AVX-512-BF16 or AMX this is 1.2 to 1.5 times as fast as ``F.linear`` for 1 to 64 rows and about equal
    above (benchmarks/kernels.py); the packed copy replaces the plain one, so memory stays the same.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self._multiply: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self.weight_bytes = weight.nbytes
        self.rows = None  # the order is oneDNN's own secret

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._packed, self._bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies this weight natively in its packed order on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class NoQuantization:
    """Full precision."""

    name = "none"

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        native = library()
        if native is not None and NativeLinear.can_hold(weight):
            return NativeLinear(native, weight, bias)
        return _PackedLinear(weight, bias) if can_pack(weight) else _PlainLinear(weight, bias)

    def prepare_experts(self, weight: Tensor) -> PreparedExperts:
        if why_not(weight.device) is None:
            return TritonExperts(weight)
        native = library()
        if native is not None and NativeExperts.can_hold(weight):
            return NativeExperts(native, weight)
        return GroupedExperts(weight)
