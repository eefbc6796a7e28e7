"""``nanoserve bench``: a seeded workload on a running service or on a model in this process; a table and JSON."""

import argparse
import asyncio
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.cli.engine_flags import add_engine_flags, engine_settings
from nanoserve.core.errors import ConfigError, UnavailableError
from nanoserve.observe.latency import Figures, Objective, latencies, throughput
from nanoserve.observe.load import Outcome, closed_loop, open_loop
from nanoserve.observe.workloads import Workload, arrivals

if TYPE_CHECKING:
    from nanoserve.cli.bench_targets import EngineTarget, HttpTarget


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help='a folder, a hub id or "demo"; with --url, its name there')
    parser.add_argument("--url", help="a running service instead of an engine in this process")
    parser.add_argument("--api-key", help="for --url (or NANOSERVE_API_KEY)")
    group = parser.add_argument_group("workload")
    group.add_argument("--requests", type=int, default=64, metavar="N", help="(default: 64)")
    group.add_argument("--input-tokens", type=_span, default=(16, 256), metavar="A:B", help="(default: 16:256)")
    group.add_argument("--output-tokens", type=_span, default=(16, 128), metavar="A:B", help="(default: 16:128)")
    group.add_argument("--shared-tokens", type=int, default=0, metavar="N", help="first tokens that all have in common")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same requests")
    loop = group.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, default=16, metavar="N", help="closed loop: clients (default: 16)")
    loop.add_argument(
        "--rate", type=float, metavar="R", help="open loop: requests a second, at random; inf: all at once"
    )
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before the measured (default: 2)")
    group.add_argument("--slo-ttft-ms", type=float, default=1000.0, metavar="MS", help="for goodput (default: 1000)")
    group.add_argument("--slo-tpot-ms", type=float, default=100.0, metavar="MS", help="for goodput (default: 100)")
    parser.add_argument("--output", type=Path, default=Path("nanoserve-bench.json"), metavar="FILE", help="the JSON")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or a range such as 16:256. Given: {text!r}.") from None
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"must be a range of numbers >= 1. Given: {text!r}.")
    return low, high


def run(options: argparse.Namespace) -> int:
    """Returns 1 when a request failed: figures of the rest would flatter the service."""
    _check(options)
    workload = Workload(
        num_requests=options.requests,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        num_shared_tokens=options.shared_tokens,
        seed=options.seed,
    )
    about, outcomes = asyncio.run(_measure(options, workload))
    objective = Objective(ttft_s=options.slo_ttft_ms / 1e3, tpot_s=options.slo_tpot_ms / 1e3)
    loop = {"rate": str(options.rate)} if options.rate is not None else {"concurrency": options.concurrency}
    record: dict[str, Any] = {"about": about | {"machine": _machine()}, "workload": asdict(workload), "loop": loop}
    record |= {"slo": {"ttft_ms": options.slo_ttft_ms, "tpot_ms": options.slo_tpot_ms}}
    record |= report(outcomes, objective)
    print(table(record["throughput"], record["latency"]))
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\n{record['num_done']} requests done, {record['num_failed']} failed; written: {options.output}")
    for message in record["errors"]:
        print(f"failed: {message}")
    return 1 if record["num_failed"] else 0


def _check(options: argparse.Namespace) -> None:
    if bool(options.url) and (given := engine_settings(options).keys() - {"model", "seed"}):
        raise ConfigError(f"With --url the engine's flags have no effect; leave out {', '.join(sorted(given))}.")
    for name, low in (("requests", 1), ("concurrency", 1), ("warmup", 0), ("shared_tokens", 0)):
        if getattr(options, name) < low:
            raise ConfigError(f"`--{name.replace('_', '-')}` must be >= {low}. Given: {getattr(options, name)}.")
    for name in ("rate", "slo_ttft_ms", "slo_tpot_ms"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"`--{name.replace('_', '-')}` must be > 0. Given: {value}.")
    if not options.output.parent.is_dir():
        raise ConfigError(f"There is no folder for --output {options.output}.")


async def _measure(options: argparse.Namespace, workload: Workload) -> tuple[dict[str, Any], list[Outcome]]:
    target, about = _target(options)
    try:
        warmup = replace(workload, num_requests=options.warmup, num_shared_tokens=0, seed=workload.seed + 2**32)
        if failed := [outcome for outcome in await closed_loop(target, warmup.items(), 1) if outcome.trace is None]:
            raise UnavailableError(f"The first request failed: {failed[0].error}")
        items = workload.items()
        if options.rate is None:
            return about, await closed_loop(target, items, options.concurrency)
        return about, await open_loop(target, items, arrivals(options.rate, len(items), options.seed))
    finally:
        await target.close()


def _target(options: argparse.Namespace) -> "tuple[HttpTarget | EngineTarget, dict[str, Any]]":
    from nanoserve.cli.bench_targets import EngineTarget, HttpTarget
    from nanoserve.cli.conversation import connect

    if options.url:
        client, model = connect(options.url, options.model, options.api_key or os.environ.get("NANOSERVE_API_KEY"))
        client.close()
        return HttpTarget(client.base_url, client.headers, model), {"url": options.url, "model": model}
    engine = EngineTarget({name: value for name, value in engine_settings(options).items() if name != "seed"})
    return engine, {"model": engine.info.name, "engine": asdict(engine.info)}


def report(outcomes: Sequence[Outcome], objective: Objective) -> dict[str, Any]:
    """The figures of a run; of the failures, up to five different messages."""
    traces = [outcome.trace for outcome in outcomes if outcome.trace is not None]
    num_input_tokens = sum(len(outcome.item.prompt_token_ids) for outcome in outcomes if outcome.trace is not None)
    return {
        "num_done": len(traces),
        "num_failed": len(outcomes) - len(traces),
        "errors": list(dict.fromkeys(outcome.error for outcome in outcomes if outcome.trace is None))[:5],
        "throughput": throughput(traces, num_input_tokens, objective) if traces else {},
        "latency": latencies(traces),
    }


def table(rates: Figures, spreads: Mapping[str, Figures]) -> str:
    """Rates line by line, then one line a latency."""
    lines = [f"{name:<24}{_short(value):>12}" for name, value in rates.items()]
    columns = ["mean", "p50", "p90", "p99"]
    lines += ["", " " * 12 + "".join(f"{column:>12}" for column in columns)] if spreads else []
    lines += [f"{name:<12}" + "".join(f"{_short(row[c]):>12}" for c in columns) for name, row in spreads.items()]
    return "\n".join(lines)


def _short(value: float) -> str:
    """Three digits at least, none of them exponents."""
    digits = 0 if value == int(value) else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def _machine() -> str:
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
