"""The KV pool: how large it may be, and its memory."""

import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from nanoserve.core.config import EngineArgs, parse_bytes
from nanoserve.core.errors import ConfigError
from nanoserve.model.attention.base import AttentionBackend
from nanoserve.model.kernels.native import memory

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_DEFAULT_FRACTION = 0.4
_DEFAULT_CUDA_FRACTION = 0.9  # of what is free beside the weights and the largest step
_DEFAULT_MAX_BYTES = 4 * 2**30
_CGROUP = Path("/sys/fs/cgroup")


class KVPool:
    """The KV memory of all layers, ``blocks`` [num_blocks, ...]. Which block is whose is not known here."""

    def __init__(
        self, backend: AttentionBackend, *, num_layers: int, num_blocks: int, device: torch.device = _CPU
    ) -> None:
        shape = backend.kv_shape(num_layers=num_layers, num_blocks=num_blocks)
        # Zeroed: padding reads blocks that nobody wrote, and a masked NaN is still a NaN.
        if device.type == "cpu":
            self.blocks = memory.zeros(shape, backend.kv_dtype)
        else:
            self.blocks = torch.zeros(shape, dtype=backend.kv_dtype, device=device)
        self.layers: tuple[Tensor, ...] = tuple(backend.layer(self.blocks, i) for i in range(num_layers))


def count_blocks(
    args: EngineArgs, *, block_bytes: int, max_useful_blocks: int, free_on_device: int | None = None
) -> int:
    """Blocks that a rank's share of the memory buys; never more than ``max_useful_blocks`` unless a size was asked for.

    ``free_on_device``: bytes that a GPU has left for them; None on a CPU.

    Raises:
        ConfigError: not even one block fits.
    """
    if args.kv_cache_memory is not None:
        budget = parse_bytes(args.kv_cache_memory) // args.tensor_parallel_size
        num_blocks = budget // block_bytes
    else:
        num_sharers = args.tensor_parallel_size if free_on_device is None else 1  # each has a GPU of its own
        budget = _default_budget(args.memory_fraction, free_on_device) // num_sharers
        num_blocks = min(budget // block_bytes, max_useful_blocks)
    if num_blocks < 1:
        raise ConfigError(
            f"The KV cache needs at least {block_bytes} bytes for one block. Given: {budget}.", param="kv_cache_memory"
        )
    return num_blocks


def _default_budget(fraction: float | None, free_on_device: int | None) -> int:
    if fraction is None and free_on_device is not None:
        fraction = _DEFAULT_CUDA_FRACTION
    if fraction is None:
        return min(int(available_memory() * _DEFAULT_FRACTION), _DEFAULT_MAX_BYTES)
    if not 0 < fraction <= 1:
        raise ConfigError(f"`memory_fraction` must be in (0, 1]. Given: {fraction!r}.", param="memory_fraction")
    return int((available_memory() if free_on_device is None else free_on_device) * fraction)


def available_memory() -> int:
    """Bytes that this process can still take: what the machine has free, and what its control group leaves."""
    return max(min(_machine_available(), *_cgroup_rooms()), 0)


def _machine_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms() -> list[int]:
    """Limit minus use of the control group, for both versions; file pages that can be dropped do not count as use."""
    rooms = [2**63]
    for limit, usage, folder in (
        ("memory.max", "memory.current", _CGROUP),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", _CGROUP / "memory"),
    ):
        try:
            used = int((folder / usage).read_text()) - _inactive_file_bytes(folder)
            rooms.append(int((folder / limit).read_text()) - used)
        except (OSError, ValueError):  # no such version here, or the limit is the word "max"
            continue
    return rooms


def _inactive_file_bytes(folder: Path) -> int:
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
