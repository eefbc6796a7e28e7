"""Who starts the processes of the shards. Here: child processes, for an engine that runs without Ray."""

import os
import subprocess
import sys
from typing import Protocol

import msgspec

from nanoserve.model.parallel.channel import Meeting

_MODULE = "nanoserve.model.parallel.shard"
_DEVICES = "CUDA_VISIBLE_DEVICES"


class Launcher(Protocol):
    """Starts processes that call :func:`nanoserve.model.parallel.shard.run`. ``host``: where other machines reach this
    one, if a shard may be on one of them."""

    @property
    def host(self) -> str | None: ...

    def start(self, meeting: Meeting, num_ranks: int) -> None:
        """Starts ranks 1 ... ``num_ranks`` - 1."""
        ...

    def died(self) -> str | None:
        """Why a shard will never call, where that is so by now."""
        ...

    def stop(self) -> None:
        """Ends what still runs, after the shards were told to leave."""
        ...


class Order(msgspec.Struct, frozen=True):
    """What a child process reads from its standard input."""

    meeting: Meeting
    rank: int


class ChildProcesses:
    """Shards on this machine; each of them sees its own one of the GPUs that this process sees."""

    host: str | None = None

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, meeting: Meeting, num_ranks: int) -> None:
        for rank in range(1, num_ranks):
            child = subprocess.Popen(
                [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, env=os.environ | _device(rank)
            )
            self._children.append(child)
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(Order(meeting, rank)))
            child.stdin.close()

    def died(self) -> str | None:
        for rank, child in enumerate(self._children, start=1):
            if (status := child.poll()) is not None:
                return f"shard {rank} ended with status {status}"
        return None

    def stop(self) -> None:
        for child in self._children:
            try:
                child.wait(2)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _device(rank: int) -> dict[str, str]:
    visible = os.environ.get(_DEVICES)
    names = visible.split(",") if visible else []
    return {_DEVICES: names[rank] if rank < len(names) else str(rank)}
