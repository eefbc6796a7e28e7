"""What a step costs besides the model: schedule, batch building, sampling dispatch and update with many decodes.

    python -m benchmarks.engine_overhead

The scheduler's part is measured with an executor that answers from a constant; the whole step with the real runner
around a network that computes nothing and a small vocabulary, greedily and with Qwen3's default sampling. The garbage
collector stays on, as in service. Prints a table and writes benchmarks/results/engine_overhead.json.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.plan import ModelRunnerOutput, SampledTokens, SchedulerOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.model.attention import choose_backend
from nanoserve.model.attention.base import AttentionSpec
from nanoserve.model.grammar import GrammarTable, GrammarTokenizer
from nanoserve.model.input_batch import InputBatch
from nanoserve.model.kv_cache import KVPool
from nanoserve.model.runner import ModelRunner
from nanoserve.scheduler.scheduler import Scheduler

Execute = Callable[[SchedulerOutput], ModelRunnerOutput]
RESULTS = Path(__file__).parent / "results" / "engine_overhead.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Decodes that never end within the measured steps, with prompts of different lengths."""

    num_seqs: int = 256
    num_prompt_tokens: int = 512
    num_steps: int = 400
    num_warmup_steps: int = 50
    block_size: int = 16

    @property
    def num_tokens(self) -> int:
        """The longest that a sequence gets."""
        return self.num_prompt_tokens + self.num_warmup_steps + self.num_steps + 64


GREEDY: dict[str, float | int] = {"temperature": 0.0}
QWEN3: dict[str, float | int] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def start(workload: Workload, execute: Execute, settings: Mapping[str, float | int]) -> Scheduler:
    """A scheduler in which every sequence of the workload decodes."""
    num_tokens = workload.num_tokens
    config = SchedulerConfig(
        num_blocks=workload.num_seqs * (num_tokens // workload.block_size + 2),
        block_size=workload.block_size,
        max_num_seqs=workload.num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=num_tokens,
    )
    scheduler = Scheduler(config)
    for i in range(workload.num_seqs):
        prompt = tuple((i * 7919 + j) % 50_000 for j in range(workload.num_prompt_tokens - i % 64))
        sampling = SamplingParams(max_tokens=None, stop_token_ids=(151_645, 151_643), seed=i, **settings)  # type: ignore[arg-type]
        scheduler.add(GenerateRequest(request_id=f"request-{i}", prompt_token_ids=prompt, sampling=sampling))
    while scheduler.stats().num_generated_tokens_total < workload.num_seqs:
        step(scheduler, execute)
    return scheduler


def step(scheduler: Scheduler, execute: Execute) -> tuple[float, float, float]:
    """One step; milliseconds of schedule, of the executor, and of update."""
    start_s = time.perf_counter()
    plan = scheduler.schedule()
    planned_s = time.perf_counter()
    result = execute(plan)
    executed_s = time.perf_counter()
    scheduler.update(plan, result)
    scheduler.stats()
    ended_s = time.perf_counter()
    return (planned_s - start_s) * 1e3, (executed_s - planned_s) * 1e3, (ended_s - executed_s) * 1e3


def answer(plan: SchedulerOutput) -> ModelRunnerOutput:
    sampled = {r.request_id: SampledTokens((r.num_computed_tokens % 50_000,)) for r in plan.scheduled if r.num_samples}
    return ModelRunnerOutput(step_id=plan.step_id, sampled=sampled)


class NullNetwork:
    """Computes nothing: every hidden state is zero, every row of logits the same noise."""

    def __init__(self) -> None:
        self._row = torch.randn(1, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, kv_layers: object, metadata: object) -> Any:
        return torch.zeros(len(token_ids), 8)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._row.expand(len(hidden), -1).contiguous()


def runner(workload: Workload) -> ModelRunner:
    """The real runner around a network that costs nothing."""
    blocks_per_request = workload.num_tokens // workload.block_size + 2
    spec = AttentionSpec(
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        block_size=workload.block_size,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    backend, _ = choose_backend("auto", spec)
    return ModelRunner(
        NullNetwork(),
        backend,
        KVPool(backend, num_layers=1, num_blocks=workload.num_seqs * blocks_per_request),
        batch=InputBatch(
            max_num_seqs=workload.num_seqs,
            max_blocks_per_request=blocks_per_request,
            block_size=workload.block_size,
        ),
        grammars=GrammarTable(GrammarTokenizer(Path(), 2048)),
        max_num_seqs=workload.num_seqs,
    )


def measure(workload: Workload, execute: Execute, settings: Mapping[str, float | int]) -> dict[str, float]:
    """Milliseconds a step: p50, p99 and mean of schedule, executor, update (with stats), and of all.

    ``loop_cpu_mean_ms`` is the thread's CPU time of a whole step; unlike the wall times
    it does not grow when other processes take the core.
    """
    scheduler = start(workload, execute, settings)
    for _ in range(workload.num_warmup_steps):
        step(scheduler, execute)
    start_cpu_s = time.thread_time()
    times = [step(scheduler, execute) for _ in range(workload.num_steps)]
    loop_cpu_s = time.thread_time() - start_cpu_s
    columns = dict(zip(("schedule", "execute", "update"), zip(*times, strict=True), strict=True))
    columns["total"] = tuple(map(sum, times))
    figures: dict[str, float] = {}
    for name, values in columns.items():
        cuts = statistics.quantiles(values, n=100)
        figures |= {f"{name}_p50_ms": cuts[49], f"{name}_p99_ms": cuts[98], f"{name}_mean_ms": statistics.mean(values)}
    figures["loop_cpu_mean_ms"] = loop_cpu_s * 1e3 / workload.num_steps
    return {name: round(value, 4) for name, value in figures.items()}


def commit() -> str:
    """The commit that was measured, with a plus sign when the tree has changes."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--", "nanoserve"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--num-steps", type=int, default=Workload().num_steps)
    args = parser.parse_args()
    rows = []
    for num_seqs in args.num_seqs:
        workload = Workload(num_seqs=num_seqs, num_steps=args.num_steps)
        for name, execute, settings in (
            ("scheduler alone", answer, GREEDY),
            ("whole step, greedy", runner(workload).execute, GREEDY),
            ("whole step, top-k and top-p", runner(workload).execute, QWEN3),
        ):
            figures = measure(workload, execute, settings)
            rows.append({"what": name, "workload": asdict(workload), **figures})
            columns = "  ".join(
                f"{key} {value:7.3f}" for key, value in figures.items() if "total" in key or "cpu" in key
            )
            print(f"{num_seqs:4d} running, {name:28} {columns}")
    report = {
        "command": ("python -m benchmarks.engine_overhead " + " ".join(sys.argv[1:])).strip(),
        "commit": commit(),
        "device": f"{platform.machine()} CPU, one thread",
        "python": platform.python_version(),
        "results": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


if __name__ == "__main__":
    main()
