"""What every benchmark prints and writes: percentiles, a table, and JSON with commit, command and machine."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nanoserve.observe.latency import Trace, percentile

__all__ = ["RESULTS", "Trace", "percentile", "summary", "table", "write"]

RESULTS = Path(__file__).parent / "results"


def summary(traces: Sequence[Trace]) -> dict[str, float]:
    """Throughput and latency of a run: output tokens per second over the whole run, TTFT and ITL percentiles in ms."""
    ttft = [1e3 * (trace.token_times_s[0] - trace.sent_s) for trace in traces]
    itl = [1e3 * (b - a) for t in traces for a, b in zip(t.token_times_s, t.token_times_s[1:], strict=False)]
    num_tokens = sum(len(trace.token_times_s) for trace in traces)
    wall = max(t.token_times_s[-1] for t in traces) - min(t.sent_s for t in traces)
    return {
        "output_tokens": num_tokens,
        "wall_s": wall,
        "output_tokens_per_s": num_tokens / wall,
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "itl_p50_ms": percentile(itl, 0.5),
        "itl_p99_ms": percentile(itl, 0.99),
    }


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Rows of figures as a Markdown table; a missing figure is a dash."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = ["| |" + "|".join(f" {name} " for name in columns) + "|", "|---|" + "---|" * len(columns)]
    for title, row in rows.items():
        lines.append(f"| {title} |" + "|".join(f" {row[c]:.4g} " if c in row else " - " for c in columns) + "|")
    return "\n".join(lines)


def write(name: str, figures: Mapping[str, object]) -> Path:
    """Write ``results/<name>.json`` with what is needed to repeat it; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"command": _command(), "commit": _commit(), "machine": _machine(), **figures}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def _command() -> str:
    main = sys.modules["__main__"].__spec__
    return " ".join(["python", "-m", main.name if main else sys.argv[0], *sys.argv[1:]])


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True, cwd=RESULTS.parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _machine() -> str:
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")), "unknown CPU"
    )
    return f"{os.cpu_count()} x {model}, Python {platform.python_version()}"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
