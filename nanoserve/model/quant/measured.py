"""How many bytes the weights of a network occupy once its layers gave them to their method."""

from torch import Tensor

from nanoserve.model.quant.base import LinearMethod, PreparedLinear
from nanoserve.model.quant.experts import PreparedExperts, prepare_experts


class MeasuredMethod:
    """A method that keeps count: ``saved_bytes`` less are occupied than the loaded weights were."""

    def __init__(self, method: LinearMethod) -> None:
        self._method = method
        self.name = method.name
        self.saved_bytes = 0

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        loaded_bytes = weight.nbytes
        prepared = self._method.prepare(weight, bias)
        self.saved_bytes += loaded_bytes - prepared.weight_bytes
        return prepared

    def prepare_experts(self, weight: Tensor) -> PreparedExperts:
        loaded_bytes = weight.nbytes
        prepared = prepare_experts(self._method, weight)
        self.saved_bytes += loaded_bytes - prepared.weight_bytes
        return prepared
