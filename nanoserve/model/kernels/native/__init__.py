"""Kernels compiled for this machine's CPU, called by ctypes; see ``cpu.cpp`` for what there is.

:func:`library` gives the loaded level, or None where there is none, and :func:`why_not` the reason.
"""

from nanoserve.model.kernels.native import memory
from nanoserve.model.kernels.native.dispatch import Library, library, why_not

__all__ = ["Library", "library", "memory", "why_not"]
