"""How the weights of a layer's experts are stored and multiplied: one call for all of them, rows sorted by expert."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nanoserve.model.kernels.native import Library, memory
from nanoserve.model.quant.base import LinearMethod, PreparedLinear

_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}


class PreparedExperts(Protocol):
    """The weights of all experts in their final form. ``weight_bytes`` counts what they occupy."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``rows`` [num_rows, in_features], where expert e owns those before ``ends[e]`` that e - 1 does not.

        ``ends`` int32 [num_experts]; the last of them is num_rows. Gives [num_rows, out_features] in the same order.
        """
        ...


@runtime_checkable
class ExpertsMethod(Protocol):
    """What a :class:`LinearMethod` may offer besides, to multiply by all experts in one call."""

    def prepare_experts(self, weight: Tensor) -> PreparedExperts:
        """``weight`` [num_experts, out_features, in_features]; the layer drops it afterwards."""
        ...


def prepare_experts(method: LinearMethod, weight: Tensor) -> PreparedExperts:
    """The final form of ``weight`` [num_experts, out_features, in_features] under ``method``."""
    if isinstance(method, ExpertsMethod):
        return method.prepare_experts(weight)
    return SeparateExperts([method.prepare(part, None) for part in weight])


class SeparateExperts:
    """Each expert is a linear weight of its own, and one call."""

    def __init__(self, experts: Sequence[PreparedLinear]) -> None:
        self._experts = experts
        self.weight_bytes = sum(expert.weight_bytes for expert in experts)

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = zip(self._experts, rows.split(sizes), strict=True)
        return torch.cat([expert(part) for expert, part in parts if len(part)])


class GroupedExperts:
    """Full precision by ``torch._grouped_mm``: unpacked weights, and the reference for whatever is faster."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.transpose(1, 2)
        self.weight_bytes = weight.nbytes

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(rows, self._weight, offs=ends)


class TritonExperts:
    """Full precision on a GPU (``kernels/triton/experts.py``), in one launch whose size is not up to the router."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.weight_bytes = weight.nbytes

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        from nanoserve.model.kernels.triton.experts import grouped_product

        return grouped_product(rows, self._weight, ends)


class NativeExperts:
    """Full precision in the panels of the native kernels (``kernels/native/experts.h``).

    A row's result is the same to the last bit whatever other rows stand beside it.
    """

    def __init__(self, native: Library, weight: Tensor) -> None:
        name = _NAMES[weight.dtype]
        self._shape = weight.shape
        count, out_features, in_features = weight.shape
        self._multiply = native.bind(f"ns_experts_{name}", "pppplll")
        num_bytes = native.bind(f"ns_{name}_bytes", "ll")(out_features, in_features)
        self._packed = memory.zeros((count, num_bytes // weight.itemsize), weight.dtype)
        self.weight_bytes: int = self._packed.nbytes
        pack = native.bind(f"ns_pack_{name}", "plpll")
        for expert, packed in zip(weight, self._packed, strict=True):
            pack(expert.contiguous().data_ptr(), in_features, packed.data_ptr(), out_features, in_features)

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.dtype in _NAMES

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        rows, y = check_rows(rows, ends, self._shape, self._packed.dtype)
        self._multiply(rows.data_ptr(), self._packed.data_ptr(), y.data_ptr(), ends.data_ptr(), *self._shape)
        return y


def check_rows(rows: Tensor, ends: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Contiguous rows and memory for the result; whatever would make a native call read or write beyond them fails."""
    count, out_features, in_features = shape
    assert rows.dtype == dtype, f"input is {rows.dtype}, the weight {dtype}"
    assert rows.shape[1] == in_features, f"input is {tuple(rows.shape)}, the weight {tuple(shape)}"
    assert ends.dtype == torch.int32, f"ends are {ends.dtype}"
    assert ends.shape == (count,), f"{tuple(ends.shape)} ends of {count} experts"
    assert int(ends[-1]) == len(rows), f"the last rows end at {int(ends[-1])} of {len(rows)}"
    return rows.contiguous(), torch.empty(len(rows), out_features, dtype=dtype)
