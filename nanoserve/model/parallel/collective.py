"""What a network asks of its rank's peers. All ranks make the same calls in the same order."""

from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """The ranks of one network. After :meth:`abort`, or when a peer is gone, calls raise ``ShardLostError``."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def native_address(self) -> int | None:
        """For a native call that sums by itself (``kernels/native/ranks.h``); None where it cannot."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, possibly in place; the same bits on every rank."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """The ranks' ``x`` [num_rows, size] side by side: [num_rows, num_ranks * size] on rank 0, empty elsewhere."""
        ...

    def abort(self) -> None:
        """Ends calls that wait for a peer, here and at the peers; any thread may call it."""
        ...

    def close(self) -> None:
        """Gives the connections back."""
        ...


class Alone:
    """A network that is not shared."""

    name = "none"
    rank = 0
    size = 1
    native_address: int | None = None

    def sum(self, x: Tensor) -> Tensor:
        return x

    def join(self, x: Tensor) -> Tensor:
        return x

    def abort(self) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """There is nothing to give back."""


ALONE: Collective = Alone()
