"""The seam between layers and the fused operations that they are made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from nanoserve.model.parallel import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a dense decoder layer is made of: norm weights, and linear layers in their final form."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor
    eps: float
    qkv: object
    o: object
    gate_up: object
    down: object


class Stack(Protocol):
    """All layers of a network as one operation."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, kv_layers: Iterable[Tensor], metadata: Any) -> Tensor:
        """Runs ``x`` [num_tokens, hidden_size] through the layers, possibly in place, and stores KV."""
        ...


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

    def fuse(self, layers: Sequence[LayerParts], backend: object, collective: Collective) -> Stack | None:
        """The layers with their attention ``backend`` as one operation; None: run them one by one.

        ``collective`` sums what attention and the feed-forward layer add.
        """
        ...
