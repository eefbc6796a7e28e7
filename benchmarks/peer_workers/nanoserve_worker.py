"""nanoserve's engine, stepped in this process."""

from collections.abc import Sequence

from benchmarks.engine import Offline
from benchmarks.peer_workers.lines import Settings, serve
from benchmarks.report import Trace
from benchmarks.workloads import Item
from nanoserve import __version__
from nanoserve.core.config import EngineArgs


class Nanoserve:
    """``prefix_cache`` is honoured run by run."""

    version = __version__

    def __init__(self, settings: Settings) -> None:
        self._offline = Offline(
            EngineArgs(
                model=settings.folder,
                quantization=settings.quantization,
                kv_cache_memory=settings.kv_bytes,
                max_model_len=settings.max_model_len,
                num_threads=settings.num_threads,
            )
        )

    def run(self, items: Sequence[Item], *, prefix_cache: bool) -> list[Trace]:
        return self._offline.run(items, prefix_cache=prefix_cache)


if __name__ == "__main__":
    serve(Nanoserve)
