"""llama.cpp's server, which the xllamacpp wheel bundles, asked over HTTP in this process (it has no other way in).

The checkpoint is written once as GGUF: BF16, Q8_0 or Q4_0.
"""

import http.client
import importlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peer_workers.gguf_writer import write_gguf
from benchmarks.peer_workers.lines import Settings, serve
from benchmarks.report import Trace
from benchmarks.workloads import Item

_TYPES = {"none": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
_SLOTS = 16


class LlamaCpp:
    """A slot for each of 16 requests; a slot keeps its own last prompt, and prompts are shared between slots by it."""

    def __init__(self, settings: Settings) -> None:
        library: Any = importlib.import_module("xllamacpp")
        self.version = version("xllamacpp")
        params = library.CommonParams()
        params.model.path = str(_converted(settings))
        params.n_parallel = _SLOTS
        params.n_ctx = _SLOTS * 1280
        params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.num_threads
        params.n_batch = params.n_ubatch = 512
        params.port = 0
        params.hostnames = ["127.0.0.1"]
        self._server: Any = library.Server(params)
        self._address = urlsplit(self._server.listening_address).netloc

    def run(self, items: Sequence[Item], *, prefix_cache: bool) -> list[Trace]:
        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(self._ask, items))

    def _ask(self, item: Item) -> Trace:
        body = {
            "prompt": list(item.prompt_token_ids),
            "n_predict": item.num_output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
        }
        connection = http.client.HTTPConnection(self._address, timeout=600)
        start, stamps = time.perf_counter(), list[float]()
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                count = event.get("tokens_predicted") or len(stamps) + len(event.get("tokens", ()))
                stamps += [time.perf_counter()] * (count - len(stamps))
        connection.close()
        return Trace(sent_s=start, token_times_s=tuple(stamps))


def _converted(settings: Settings) -> Path:
    kind = _TYPES[settings.quantization]
    path = Path(f"{settings.converted}-{kind}.gguf")
    if not path.exists():
        write_gguf(Path(settings.folder), path, kind)
    return path


if __name__ == "__main__":
    serve(LlamaCpp)
