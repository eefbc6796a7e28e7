"""The seam between a layer and the way its weight is stored and multiplied."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class PreparedLinear(Protocol):
    """A weight in its final form. ``weight_bytes`` counts what it occupies.

    ``rows`` gives rows of the weight, [num_rows] ids -> [num_rows, in_features], so that a tied embedding needs no
    copy of its own; None where the form does not allow that.
    """

    @property
    def weight_bytes(self) -> int: ...

    @property
    def rows(self) -> Callable[[Tensor], Tensor] | None: ...

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]."""
        ...


class LinearMethod(Protocol):
    """How linear weights are stored and multiplied. A layer decides what it holds, its method how.

    ``prepare`` gets the loaded weight [out_features, in_features] and gives its final form; the layer then drops the
    original, so a method that keeps it must hold on to it.
    """

    @property
    def name(self) -> str: ...

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear: ...


LinearMethodFactory = Callable[[], LinearMethod]
