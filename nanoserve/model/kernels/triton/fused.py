"""The operations of ``kernels/plain.py`` on a GPU, a launch each."""

from collections.abc import Sequence

from nanoserve.model.kernels.base import LayerParts
from nanoserve.model.kernels.triton.rows import add_rms_norm, rms_norm, silu_and_mul, weighted_sum
from nanoserve.model.parallel import Collective

__all__ = ["add_rms_norm", "fuse", "rms_norm", "silu_and_mul", "weighted_sum"]


def fuse(layers: Sequence[LayerParts], backend: object, collective: Collective) -> None:
    """Layers run one by one; a captured graph makes one launch of all."""
