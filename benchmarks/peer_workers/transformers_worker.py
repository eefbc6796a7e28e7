"""transformers: one left-padded batch through ``generate``. It keeps no cache of prefixes."""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.peer_workers.lines import Settings, serve
from benchmarks.peers import TransformersPeer
from benchmarks.report import Trace
from benchmarks.workloads import Item


class Transformers:
    version: str = transformers.__version__

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.num_threads)
        self._peer = TransformersPeer(Path(settings.folder), torch.bfloat16)

    def run(self, items: Sequence[Item], *, prefix_cache: bool) -> list[Trace]:
        return self._peer.run(items)


if __name__ == "__main__":
    serve(Transformers)
