"""How the weights of a layer's experts are stored and multiplied: one call for all of them.

Rows come sorted by expert. A :class:`LinearMethod` that can store experts has a ``prepare_experts``; full precision has
torch's grouped product to fall back on.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nanoserve.core.errors import ConfigError
from nanoserve.model.quant.base import LinearMethod


class PreparedExperts(Protocol):
    """The weights of all experts in their final form. ``weight_bytes`` counts what they occupy."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``rows`` [num_rows, in_features], where expert e owns those before ``ends[e]`` that e - 1 does not.

        ``ends`` int32 [num_experts]. Gives [num_rows, out_features] in the same order.
        """
        ...


@runtime_checkable
class ExpertsMethod(Protocol):
    """What a :class:`LinearMethod` may offer besides. The layer drops ``weight`` afterwards."""

    def prepare_experts(self, weight: Tensor) -> PreparedExperts:
        """``weight`` [num_experts, out_features, in_features]."""
        ...


class GroupedExperts:
    """Full precision by ``torch._grouped_mm``: unpacked weights, and the reference for whatever is faster."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.transpose(1, 2)
        self.weight_bytes = weight.nbytes

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(rows, self._weight, offs=ends)


def prepare_experts(method: LinearMethod, weight: Tensor) -> PreparedExperts:
    """The final form of ``weight`` [num_experts, out_features, in_features] under ``method``.

    Raises:
        ConfigError: the method cannot store experts.
    """
    if isinstance(method, ExpertsMethod):
        return method.prepare_experts(weight)
    if method.name != "none":
        raise ConfigError(
            f"`quantization` {method.name!r} cannot store mixture-of-experts layers; choose none.", param="quantization"
        )
    return GroupedExperts(weight)
