"""The memory of the KV tiers below the pool, and copies of blocks between all of them.

Which block lies where is the scheduler's business. A copy from the disk runs on a thread beside the step and is joined
at its end; all others are made at once and in order.
"""

import logging
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoserve.core.config import EngineArgs, parse_bytes
from nanoserve.core.errors import ConfigError
from nanoserve.core.plan import BlockCopy
from nanoserve.model.kernels.native import memory
from nanoserve.model.kernels.triton import why_not

logger = logging.getLogger(__name__)


class DiskTier:
    """Slots of ``block_bytes`` in a file without a name, which vanishes with this process however it ends.

    Each slot's CRC-32 stays in memory; a slot that reads back otherwise is lost.
    """

    def __init__(self, folder: str, *, num_blocks: int, block_bytes: int) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="nanoserve-kv-")  # noqa: SIM115
            self._file.truncate(num_blocks * block_bytes)
        except OSError as error:
            raise ConfigError(
                f"`kv_disk_path` must be a folder where files can be made: {error.strerror}. Given: {folder!r}.",
                param="kv_disk_path",
            ) from error
        self._block_bytes = block_bytes
        self._checksums: dict[int, int] = {}

    def write(self, slot: int, content: NDArray[np.uint8]) -> bool:
        """Whether all of it was written."""
        self._checksums[slot] = zlib.crc32(content.data)
        try:
            return os.pwrite(self._file.fileno(), content.data, slot * self._block_bytes) == self._block_bytes
        except OSError as error:
            logger.warning("KV block could not be written slot=%d error=%s", slot, error.strerror)
            return False

    def read(self, slot: int, into: NDArray[np.uint8]) -> bool:
        """Whether ``into`` now holds what was written."""
        try:
            num_read = os.preadv(self._file.fileno(), [into.data], slot * self._block_bytes)
        except OSError as error:
            logger.warning("KV block could not be read slot=%d error=%s", slot, error.strerror)
            return False
        is_good = num_read == self._block_bytes and zlib.crc32(into.data) == self._checksums.get(slot)
        if not is_good:
            logger.warning("KV block read back differs from what was written slot=%d", slot)
        return is_good

    def close(self) -> None:
        self._file.close()


class KVTiers:
    """Owns the host tier's memory and the disk tier's file; copies between them and ``pool`` [num_blocks, ...]."""

    def __init__(self, pool: Tensor, *, num_host_blocks: int = 0, disk: DiskTier | None = None) -> None:
        self._stores = {"device": pool}
        if num_host_blocks:
            host = memory.zeros((num_host_blocks, *pool.shape[1:]), pool.dtype)
            self._stores["host"] = host.pin_memory() if pool.is_cuda else host
            self._host_bytes: NDArray[np.uint8] = (
                self._stores["host"].view(torch.uint8).view(num_host_blocks, -1).numpy()
            )
        self._disk = disk
        self._reader = ThreadPoolExecutor(1, "nanoserve-kv-disk") if disk is not None else None
        self._reads: list[tuple[BlockCopy, Future[bool]]] = []
        self._lost: list[BlockCopy] = []

    @classmethod
    def allocate(cls, args: EngineArgs, pool: Tensor) -> tuple[Self, int, int]:
        """The tiers that the settings ask for, and their sizes in blocks: host, disk.

        Raises:
            ConfigError: a size does not hold one block, or the folder cannot be written.
        """
        block_bytes = pool[0].nbytes
        num_host_blocks = _count(args.kv_host_memory, block_bytes, "kv_host_memory")
        num_disk_blocks = _count(args.kv_disk_memory, block_bytes, "kv_disk_memory")
        disk = None
        if args.kv_disk_path is not None:
            disk = DiskTier(args.kv_disk_path, num_blocks=num_disk_blocks, block_bytes=block_bytes)
        return cls(pool, num_host_blocks=num_host_blocks, disk=disk), num_host_blocks, num_disk_blocks

    def start(self, copies: Sequence[BlockCopy]) -> None:
        """Make the copies in order; those from the disk are only begun."""
        for group in _groups(copies):
            tiers = group[0].source, group[0].target
            if tiers == ("disk", "host"):
                self._begin_reads(group)
            elif tiers == ("host", "disk"):
                self._write(group)
            else:
                self._copy(group)

    def finish(self) -> tuple[BlockCopy, ...]:
        """Wait for what was begun; the copies that failed since the last call."""
        self._lost += [copy for copy, read in self._reads if not read.result()]
        lost = tuple(self._lost)
        self._reads.clear()
        self._lost.clear()
        return lost

    def close(self) -> None:
        if self._reader is not None and self._disk is not None:
            self._reader.shutdown()
            self._disk.close()

    def _copy(self, group: Sequence[BlockCopy]) -> None:
        source, target = self._stores[group[0].source], self._stores[group[0].target]
        if (source.is_cuda or target.is_cuda) and why_not(self._stores["device"].device) is None:
            from nanoserve.model.kernels.triton.blocks import copy_blocks

            copy_blocks(source, target, [(copy.source_block_id, copy.target_block_id) for copy in group])
            return
        sources = torch.tensor([copy.source_block_id for copy in group], device=source.device)
        targets = torch.tensor([copy.target_block_id for copy in group], device=target.device)
        target[targets] = source[sources].to(target.device)

    def _write(self, group: Sequence[BlockCopy]) -> None:
        assert self._disk is not None, "there is no disk tier"
        for copy in group:
            if not self._disk.write(copy.target_block_id, self._host_bytes[copy.source_block_id]):
                self._lost.append(copy)

    def _begin_reads(self, group: Sequence[BlockCopy]) -> None:
        assert self._disk is not None and self._reader is not None, "there is no disk tier"  # noqa: PT018
        for copy in group:
            target = self._host_bytes[copy.target_block_id]
            self._reads.append((copy, self._reader.submit(self._disk.read, copy.source_block_id, target)))


def _count(size: str | int | None, block_bytes: int, param: str) -> int:
    if size is None:
        return 0
    num_blocks = parse_bytes(size) // block_bytes
    if not num_blocks:
        raise ConfigError(f"`{param}` must hold at least one block of {block_bytes} bytes. Given: {size}.", param=param)
    return num_blocks


def _groups(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Runs of copies between the same tiers in which none writes what another one reads or writes."""
    group: list[BlockCopy] = []
    targets: set[int] = set()
    for copy in copies:
        is_same = bool(group) and (copy.source, copy.target) == (group[0].source, group[0].target)
        reads_target = copy.source == copy.target and copy.source_block_id in targets
        if group and (not is_same or copy.target_block_id in targets or reads_target):
            yield group
            group, targets = [], set()
        group.append(copy)
        targets.add(copy.target_block_id)
    if group:
        yield group
