"""Fused operations. ``plain`` writes each one in torch alone; a faster source for one device lies beside it."""

import torch

from nanoserve.model.kernels import plain
from nanoserve.model.kernels.base import Kernels
from nanoserve.model.kernels.native import library
from nanoserve.model.kernels.native.fused import NativeKernels
from nanoserve.model.kernels.triton import why_not

_CPU = torch.device("cpu")


def choose_kernels(*row_sizes: int, device: torch.device = _CPU) -> Kernels:
    """Triton's on a GPU, the native operations where they can serve rows of these sizes, else torch's."""
    if why_not(device) is None:
        from nanoserve.model.kernels.triton import fused

        return fused
    found = library() if device.type == "cpu" else None
    fits = all(size % 16 == 0 for size in row_sizes)
    return NativeKernels(found) if found is not None and fits else plain
