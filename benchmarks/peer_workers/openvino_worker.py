"""OpenVINO GenAI's continuous batching. The checkpoint is converted once by optimum-intel in the same environment."""

import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_workers.lines import Settings, serve
from benchmarks.report import Trace
from benchmarks.workloads import Item

_FORMATS = {"none": "fp16", "int8": "int8", "int4": "int4"}


class OpenVino:
    """Weights fp16, int8 or int4 as optimum-intel makes them by default; prefix cache on."""

    def __init__(self, settings: Settings) -> None:
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        self._genai: Any = importlib.import_module("openvino_genai")
        self.version: str = self._genai.__version__
        scheduling = self._genai.SchedulerConfig()
        scheduling.cache_size = max(settings.kv_bytes >> 30, 1)
        scheduling.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": settings.num_threads}
        self._pipeline: Any = self._genai.ContinuousBatchingPipeline(
            str(_converted(settings)), scheduling, "CPU", properties
        )
        self._next_id = 0

    def run(self, items: Sequence[Item], *, prefix_cache: bool) -> list[Trace]:
        start = time.perf_counter()
        handles = [self._add(item) for item in items]
        times: list[list[float]] = [[] for _ in items]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter()
            for stamps, handle in zip(times, handles, strict=True):
                while handle.can_read():
                    stamps += [now] * sum(len(output.generated_ids) for output in handle.read().values())
        return [Trace(sent_s=start, token_times_s=tuple(stamps)) for stamps in times]

    def _add(self, item: Item) -> Any:
        config = self._genai.GenerationConfig(
            max_new_tokens=item.num_output_tokens, ignore_eos=True, do_sample=False, eos_token_id=2
        )
        ids = self._numpy.array([item.prompt_token_ids], dtype=self._numpy.int64)
        self._next_id += 1
        return self._pipeline.add_request(self._next_id, self._openvino.Tensor(ids), config)


def _converted(settings: Settings) -> Path:
    weights = _FORMATS[settings.quantization]
    folder = Path(f"{settings.converted}-openvino-{weights}")
    if not (folder / "openvino_model.bin").exists():
        program = Path(sys.executable).with_name("optimum-cli")
        task = ["export", "openvino", "--task", "text-generation-with-past", "--weight-format", weights]
        subprocess.run([program, *task, "--model", settings.folder, str(folder)], check=True)
    return folder


if __name__ == "__main__":
    serve(OpenVino)
