"""vLLM's CPU build: its synchronous engine, stepped here, with its core in this process (no hop between processes)."""

import importlib
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peer_workers.lines import Settings, serve
from benchmarks.report import Trace
from benchmarks.workloads import Item


class Vllm:
    """bfloat16, prefix cache on, its own choice of kernels and limits."""

    def __init__(self, settings: Settings) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(settings.kv_bytes >> 30, 1))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["OMP_NUM_THREADS"] = str(settings.num_threads)  # unset, it leaves one core to serving
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{settings.num_threads - 1}"
        self._vllm: Any = importlib.import_module("vllm")
        self.version: str = self._vllm.__version__
        args = self._vllm.EngineArgs(
            model=settings.folder, dtype="bfloat16", max_model_len=settings.max_model_len, enable_prefix_caching=True
        )
        self._engine: Any = self._vllm.LLMEngine.from_engine_args(args)
        self._run = 0

    def run(self, items: Sequence[Item], *, prefix_cache: bool) -> list[Trace]:
        """Its engine reports all tokens of a request so far after each step; new ones get the time of the step."""
        self._run += 1
        times: dict[str, list[float]] = {f"{self._run}-{index}": [] for index in range(len(items))}
        start = time.perf_counter()
        for request_id, item in zip(times, items, strict=True):
            params = self._vllm.SamplingParams(temperature=0, max_tokens=item.num_output_tokens, ignore_eos=True)
            self._engine.add_request(request_id, {"prompt_token_ids": list(item.prompt_token_ids)}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                stamps = times["-".join(output.request_id.split("-")[:2])]
                stamps += [now] * (len(output.outputs[0].token_ids) - len(stamps))
        return [Trace(sent_s=start, token_times_s=tuple(stamps)) for stamps in times.values()]


if __name__ == "__main__":
    serve(Vllm)
