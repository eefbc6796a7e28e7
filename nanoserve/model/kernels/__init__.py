"""Fused operations. ``plain`` writes each one in torch alone; a faster source for one device lies beside it."""

from nanoserve.model.kernels import plain
from nanoserve.model.kernels.base import Kernels
from nanoserve.model.kernels.native import library
from nanoserve.model.kernels.native.fused import NativeKernels


def choose_kernels(*row_sizes: int) -> Kernels:
    """The native operations where they can serve rows of these sizes, else torch's."""
    found = library()
    fits = all(size % 16 == 0 for size in row_sizes)
    return NativeKernels(found) if found is not None and fits else plain
