"""The seam between layers and the fused operations that they are made of."""

from typing import Protocol

from torch import Tensor


class Kernels(Protocol):
    """The small operations between two matrix products. ``plain`` says what each one means."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds ``delta`` to ``x`` [num_tokens, size] in place, then norms it."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of the merged projection [num_tokens, 2 * intermediate]."""
        ...

    def weighted_sum(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Token t's sum of ``weights[t, j] * rows[places[t, j]]``, in order of j and in float32 -> [num_tokens, size].

        ``rows`` [num_rows, size]; ``places`` int64 and ``weights`` float32 [num_tokens, num_chosen].
        """
        ...
