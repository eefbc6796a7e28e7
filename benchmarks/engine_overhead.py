"""What a step costs besides the model: ``schedule`` and ``update`` with many running decodes.

    python -m benchmarks.engine_overhead

The executor answers from a constant, so the figures are the scheduler's alone. The garbage collector stays on, as in
service. Prints a table and writes benchmarks/results/engine_overhead.json.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.plan import ModelRunnerOutput, SampledTokens, SchedulerOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.scheduler.scheduler import Scheduler

RESULTS = Path(__file__).parent / "results" / "engine_overhead.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Decodes that never end within the measured steps, with prompts of different lengths."""

    num_seqs: int = 256
    num_prompt_tokens: int = 512
    num_steps: int = 400
    num_warmup_steps: int = 50
    block_size: int = 16


def start(workload: Workload) -> Scheduler:
    """A scheduler in which every sequence of the workload decodes."""
    num_tokens = workload.num_prompt_tokens + workload.num_warmup_steps + workload.num_steps + 64
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
        sampling = SamplingParams(max_tokens=None, stop_token_ids=(151_645, 151_643), seed=i)
        scheduler.add(GenerateRequest(request_id=f"request-{i}", prompt_token_ids=prompt, sampling=sampling))
    while scheduler.stats().num_generated_tokens_total < workload.num_seqs:
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, float]:
    """One step; milliseconds of schedule and of update."""
    start_s = time.perf_counter()
    plan = scheduler.schedule()
    planned_s = time.perf_counter()
    result = answer(plan)
    executed_s = time.perf_counter()
    scheduler.update(plan, result)
    scheduler.stats()
    return (planned_s - start_s) * 1e3, (time.perf_counter() - executed_s) * 1e3


def answer(plan: SchedulerOutput) -> ModelRunnerOutput:
    sampled = {r.request_id: SampledTokens((r.num_computed_tokens % 50_000,)) for r in plan.scheduled if r.num_samples}
    return ModelRunnerOutput(step_id=plan.step_id, sampled=sampled)


def measure(workload: Workload) -> dict[str, float]:
    """Milliseconds a step: p50, p99 and mean of schedule, of update (with stats), and of both.

    ``loop_cpu_mean_ms`` is the thread's CPU time of a whole step, the made-up answer included; unlike the wall times
    it does not grow when other processes take the core.
    """
    scheduler = start(workload)
    for _ in range(workload.num_warmup_steps):
        step(scheduler)
    start_cpu_s = time.thread_time()
    times = [step(scheduler) for _ in range(workload.num_steps)]
    loop_cpu_s = time.thread_time() - start_cpu_s
    columns = {"schedule": [s for s, _ in times], "update": [u for _, u in times], "total": [s + u for s, u in times]}
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
        figures = measure(workload)
        rows.append({"workload": asdict(workload), **figures})
        columns = "  ".join(
            f"{name} {value:7.3f}" for name, value in figures.items() if "total" in name or "cpu" in name
        )
        print(f"{num_seqs:4d} running  {columns}")
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
