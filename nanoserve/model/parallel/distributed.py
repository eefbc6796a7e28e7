"""Sums by torch.distributed: NCCL between GPUs, Gloo between CPUs that share no memory (or have no kernels)."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from nanoserve.core.errors import ConfigError, ShardLostError

_TIMEOUT = timedelta(seconds=120)
"""A peer that is gone ends a call sooner (``group``); this is for what nobody notices."""


class Rendezvous:
    """Where ranks find each other: a key-value store that rank 0 holds."""

    def __init__(self, host: str) -> None:
        """
        Raises:
            ConfigError: this process has a model over several ranks already, and torch allows one.
        """
        if dist.is_initialized():
            raise ConfigError(
                "This process holds a model of several ranks already; without shared memory there can be only one.",
                param="tensor_parallel_size",
            )
        self.host = host
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.store.port


class Distributed:
    """One rank's end. Each rank computes on the device that its process sees first."""

    native_address: int | None = None

    def __init__(self, backend: str, store: Store, rank: int, size: int) -> None:
        """``backend``: "nccl" or "gloo". Waits for the other ranks."""
        self.name, self.rank, self.size = backend, rank, size
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=device)

    @staticmethod
    def find(address: tuple[str, int]) -> Store:
        """A shard's way to the store of rank 0's :class:`Rendezvous`."""
        return TCPStore(*address, is_master=False, timeout=_TIMEOUT)

    def sum(self, x: Tensor) -> Tensor:
        with _peers_may_be_gone():
            dist.all_reduce(x)
        return x

    def join(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        with _peers_may_be_gone():
            if self.rank:
                dist.gather(x, dst=0)
                return x.new_empty(1).expand(len(x), self.size * x.shape[1])
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.gather(x, parts, dst=0)
        return torch.cat(parts, dim=1)

    def abort(self) -> None:
        """NCCL's kernels wait for ever otherwise; Gloo's calls end with the peers' sockets."""
        if self.name == "nccl" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, AssertionError, ValueError):  # aborted, or the peers have left
            dist.destroy_process_group()


@contextlib.contextmanager
def _peers_may_be_gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ShardLostError(f"A sum over the ranks failed: {str(error).splitlines()[0]:.200}") from error
