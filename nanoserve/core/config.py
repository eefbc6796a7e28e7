"""Settings as users give them (``EngineArgs``) and the few counts that a scheduler needs (``SchedulerConfig``)."""

import re
from dataclasses import dataclass

from nanoserve.core.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

SPECULATION = ("none", "ngram")
_COUNTS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size",
           "num_threads", "max_queued_requests", "max_queued_tokens")  # fmt: skip


def parse_bytes(size: str | int) -> int:
    """Bytes of "4GiB", "512MiB", "1e9" or an integer.

    Raises:
        ConfigError: it is not a positive size.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", str(size).lower())
    try:
        value = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value <= 0:
        raise ConfigError(f"A memory size looks like 4GiB, 512MiB or a number of bytes. Given: {size!r}.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The counts that bound a scheduler. ``num_blocks`` blocks of ``block_size`` tokens are the whole KV pool.

    ``max_queued_requests``/``max_queued_tokens`` bound the waiting queue (tokens: prompt tokens).
    ``num_speculative_tokens``: drafts that a request may have verified in one step; 0: no speculation.
    ``num_host_blocks``, ``num_disk_blocks``: the tiers that keep cached blocks which the pool evicts.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    enable_prefix_caching: bool = True
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    num_speculative_tokens: int = 0
    num_host_blocks: int = 0
    num_disk_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` must be >= 1. Given: {getattr(self, name)}.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """The engine flags of ``nanoserve serve``, ``LLM(...)`` and the Serve builder: same names, same meaning.

    ``model``: a folder, a hub id or "demo". ``kv_cache_memory``: bytes or "4GiB"; None takes ``memory_fraction`` of
    what is free after loading. ``kv_cache_dtype``: "auto" (the activations') or "int8". ``max_model_len`` None: the
    model's own, cut to what the KV pool can hold. ``tensor_parallel_size`` ranks share the model, ``kv_cache_memory``,
    ``kv_host_memory`` and ``num_threads`` out among them. ``speculation``: "none" or "ngram";
    ``num_speculative_tokens``, of which None means 8, needs the latter. ``kv_host_memory``: bytes or "4GiB" of host
    memory for cached KV that the pool evicts; ``kv_disk_memory`` as much again in a file in the folder
    ``kv_disk_path`` (/dev/shm makes it shared memory), for what the host memory evicts.
    """

    model: str = "demo"
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = "none"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory: str | int | None = None
    kv_cache_dtype: str = "auto"
    memory_fraction: float | None = None
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    seed: int | None = None
    deterministic: bool = False
    num_threads: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4_000_000
    speculation: str = "none"
    num_speculative_tokens: int | None = None
    kv_host_memory: str | int | None = None
    kv_disk_path: str | None = None
    kv_disk_memory: str | int | None = None

    def __post_init__(self) -> None:
        self._check_tiers()
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` must be >= 1. Given: {value}.", param=name)
        for size in (self.kv_cache_memory, self.kv_host_memory, self.kv_disk_memory):
            if size is not None:
                parse_bytes(size)
        if self.speculation not in SPECULATION:
            raise ConfigError(
                f"`speculation` must be one of: {', '.join(SPECULATION)}. Given: {self.speculation!r}.",
                param="speculation",
            )
        given = self.num_speculative_tokens
        if given is not None and (self.speculation == "none" or given < 1):
            reason = "needs `speculation`" if self.speculation == "none" else "must be >= 1"
            raise ConfigError(f"`num_speculative_tokens` {reason}. Given: {given}.", param="num_speculative_tokens")

    def _check_tiers(self) -> None:
        if (self.kv_disk_path is None) != (self.kv_disk_memory is None):
            raise ConfigError("`kv_disk_path` and `kv_disk_memory` must be given together.", param="kv_disk_path")
        if self.kv_disk_path is not None and self.kv_host_memory is None:
            raise ConfigError("`kv_disk_path` needs `kv_host_memory`: blocks pass through it.", param="kv_disk_path")
        if self.kv_host_memory is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "`kv_host_memory` keeps cached prefixes, so it needs prefix caching.", param="kv_host_memory"
            )

    @property
    def max_drafts(self) -> int:
        """Drafts that a request may have verified in one step; 0 without speculation."""
        return 0 if self.speculation == "none" else self.num_speculative_tokens or 8
