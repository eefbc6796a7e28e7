"""Sums between the processes of one machine, through memory that they share (``kernels/native/ranks.h``)."""

import mmap
import os

import torch
from torch import Tensor

from nanoserve.core.errors import ShardLostError
from nanoserve.model.kernels.native import Library
from nanoserve.model.threads import default_threads

_SLOT_BYTES = 1 << 20
_SPIN_US = 100
_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}


class SharedMemory:
    """One rank's end. Sums run in the order of the ranks, so all of them get the same bits, whatever the batch."""

    name = "shared memory"

    def __init__(self, native: Library, file: int, rank: int, size: int) -> None:
        """``file``: a descriptor made by :func:`create`; it may be closed afterwards."""
        self.rank, self.size = rank, size
        num_bytes = _num_bytes(native, size)
        self._memory = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        self._sum = {dtype: native.bind(f"ns_ranks_sum_{name}", "ppl") for dtype, name in _NAMES.items()}
        self._join = native.bind("ns_ranks_join", "pppll")
        self._abort = native.bind("ns_ranks_abort", "p")
        # Ranks that outnumber the cores would only keep each other from working.
        spin_us = _SPIN_US if default_threads() >= size else 0
        opened = native.bind("ns_ranks_open", "plll" + "l")
        self.native_address: int | None = opened(self._memory.data_ptr(), rank, size, _SLOT_BYTES, spin_us)

    @staticmethod
    def create(native: Library, size: int) -> int:
        """Zeroed memory for ``size`` ranks as a file without a name: it ends with the last process that holds it."""
        file = os.memfd_create("nanoserve-ranks", os.MFD_CLOEXEC)
        os.ftruncate(file, _num_bytes(native, size))
        return file

    def sum(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), "the sum is written in place"
        self._check(self._sum[x.dtype](self.native_address, x.data_ptr(), x.numel()))
        return x

    def join(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, columns = x.shape
        if self.rank:
            joined = x.new_empty(1).expand(rows, self.size * columns)
            target = None
        else:
            joined = x.new_empty(rows, self.size * columns)
            target = joined.data_ptr()
        self._check(self._join(self.native_address, x.data_ptr(), target, rows, columns * x.itemsize))
        return joined

    def abort(self) -> None:
        self._abort(self.native_address)

    def close(self) -> None:
        """The memory goes with the process: another thread may still wait in it."""

    def _check(self, aborted: int) -> None:
        if aborted:
            raise ShardLostError("The ranks of this engine have parted.")


def _num_bytes(native: Library, size: int) -> int:
    return int(native.bind("ns_ranks_bytes", "ll")(size, _SLOT_BYTES))
