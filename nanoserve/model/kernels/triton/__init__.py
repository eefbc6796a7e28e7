"""Kernels in Triton, for GPUs; ``TRITON_INTERPRET=1`` runs the same sources on a CPU, slowly, to test them.

Import a module of this package only where :func:`why_not` has no reason against it: triton may not be installed.
Offsets are int64 wherever they are multiplied by a stride, every masked load names what it reads instead, and the sizes
of tiles come from plain tables, because a captured graph cannot tune itself.
"""

import os
from importlib.util import find_spec

import torch


def why_not(device: torch.device) -> str | None:
    """Why these kernels cannot run on ``device``; None when they can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" or (device.type == "cpu" and is_interpreted()):
        return None
    return f"the device is {device.type}, not cuda"


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. Read once, when the first of them is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
