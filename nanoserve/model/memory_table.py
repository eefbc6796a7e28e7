"""What the memory of an engine went into: said at its start, and again when there is not enough."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanoserve.core.errors import ConfigError, EngineDeadError
from nanoserve.model.kv_cache import available_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Bytes, measured but for the pool's and the tiers', which are what was asked for."""

    weights_bytes: int
    kv_bytes: int
    host_tier_bytes: int = 0
    disk_tier_bytes: int = 0

    def __str__(self) -> str:
        parts = {
            "weights": self.weights_bytes,
            "KV cache": self.kv_bytes,
            "host tier": self.host_tier_bytes,
            "disk tier": self.disk_tier_bytes,
            "free now": available_memory(),
        }
        return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts.items() if size)


@contextmanager
def explained(table: MemoryTable, *, at_start: bool = False) -> Iterator[None]:
    """Turn an allocation that fails inside into an error that tells what the memory went into.

    Raises:
        ConfigError: at the start, where the settings ask for too much.
        EngineDeadError: later.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        if at_start:
            raise ConfigError(
                f"There is not enough memory; lower `kv_cache_memory` or `kv_host_memory`. Asked for: {table}.",
                param="kv_cache_memory",
            ) from error
        raise EngineDeadError(f"Out of memory in a step: {table}.") from error


def _is_out_of_memory(error: Exception) -> bool:
    """torch's CPU allocator raises a plain RuntimeError ("DefaultCPUAllocator: can't allocate memory")."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
