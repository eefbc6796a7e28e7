"""How a worker talks: settings as JSON in argv, a JSON line a run on stdin, a JSON line an answer on stdout."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from benchmarks.report import Trace
from benchmarks.workloads import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an engine is loaded with. ``quantization``: "none", "int8" or "int4". ``folder``: the checkpoint.

    ``converted``: a place beside the checkpoint for the engine's own format; ``kv_bytes``: KV cache that it may take.
    """

    folder: str
    converted: str
    quantization: str
    num_threads: int
    kv_bytes: int
    max_model_len: int


class Engine(Protocol):
    """A loaded engine. ``run`` sends every item at once, greedy, EOS ignored, and waits for all of them."""

    version: str

    def run(self, items: Sequence[Item], *, prefix_cache: bool) -> list[Trace]: ...


def serve(load: Callable[[Settings], Engine]) -> None:
    """Load as argv says, report, then run what stdin asks for until it closes.

    What libraries print goes to stderr: stdout is for answers alone.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    engine = load(Settings(**json.loads(sys.argv[1])))
    _say(answers.write, {"version": engine.version, "load_s": time.perf_counter() - start})
    answers.flush()
    for line in sys.stdin:
        order = json.loads(line)
        items = [Item(tuple(prompt), count) for prompt, count in order["items"]]
        traces = engine.run(items, prefix_cache=order["prefix_cache"])
        _say(answers.write, {"traces": [asdict(trace) for trace in traces]})
        answers.flush()


def _say(write: Callable[[str], int], answer: dict[str, object]) -> None:
    write(json.dumps(answer) + "\n")
