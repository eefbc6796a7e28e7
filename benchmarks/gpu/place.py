"""Where a step runs: on the GPU, or, to rehearse it, on a CPU in Triton's interpreter with tiny sizes."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from nanoserve.model.kernels.triton import is_interpreted

REHEARSES = is_interpreted()


def device() -> torch.device:
    """The GPU; a run without one ends here."""
    return torch.device("cpu") if REHEARSES else torch.device("cuda", torch.cuda.current_device())


def size(real: int, tiny: int) -> int:
    """``tiny`` in a rehearsal."""
    return tiny if REHEARSES else real


def synchronize() -> None:
    """Waits for the GPU."""
    if not REHEARSES:
        torch.cuda.synchronize()


def median_s(calls: Sequence[Callable[[], object]], repeat: int = 20) -> float:
    """Seconds of the median call, taken from ``calls`` in turn so that no cache holds its data; events on a GPU."""
    repeat = size(repeat, 1)
    for call in calls[:3]:
        call()
    synchronize()
    return statistics.median(_seconds(calls[i % len(calls)]) for i in range(repeat))


def _seconds(call: Callable[[], object]) -> float:
    if REHEARSES:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
