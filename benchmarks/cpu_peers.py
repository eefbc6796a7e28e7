"""nanoserve beside other engines on one machine, checkpoint and set of workloads, in turns, in one run.

    python -m benchmarks.cpu_peers --model FOLDER --peer-env vllm=ENV --peer-env openvino=ENV \\
        --peer-env llama_cpp=ENV --json peers.json

Engines: nanoserve, transformers (both in this Python), and those whose environment is named. Workloads: w1 one stream,
128 tokens in and out; w2 16 of them; w3 one prompt of 1,024; w4 16 requests that share 512 tokens; w4_off the same
without the prefix cache (nanoserve); w5 is w2 as 16 streaming clients over HTTP. Everyone gets the same token ids,
greedy, and makes exactly as many tokens as asked.

Engines of one precision are loaded together and take turns, workload by workload, round by round; then those of the
next. A round that would not end within its precision's part of --budget-s is left out, so some rows are medians of
fewer runs than others: see median_of. How to install the peers: benchmarks/README.md.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.floor import Machine, Work, measure, read_work
from benchmarks.make_checkpoint import SHAPES, random_weights, write_checkpoint
from benchmarks.peer_workers.lines import Settings
from benchmarks.peer_workers.process import Served, Worker, WorkerFailed, serve_nanoserve, serve_vllm
from benchmarks.report import Trace, summary
from benchmarks.workloads import Item, Workload

ENGINES = {
    "nanoserve": ("none", "int8", "int4"),
    "vllm": ("none",),
    "openvino": ("none", "int8", "int4"),
    "llama_cpp": ("none", "int8", "int4"),
    "transformers": ("none",),
}
_SERVERS = {"nanoserve": serve_nanoserve, "vllm": serve_vllm}
_HERE = ("nanoserve", "transformers")
_BUDGET_SHARES = {"none": 0.5, "int8": 0.25, "int4": 0.25}
_DEMO = Path(__file__).parents[1] / "nanoserve" / "demo_model"
_GRACE_S = 30.0
_METRICS = {"output": "tok/s", "prompt": "tok/s", "wall": "s", "ttft_p50": "ms", "itl_p50": "ms", "itl_p99": "ms"}
_MAIN = {"w1": "output", "w2": "output", "w3": "prompt", "w4": "wall", "w4_off": "wall", "w5": "output"}
_WORKLOADS = ("w1", "w3", "w2", "w4", "w4_off", "w5")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. ``share_of_floor``: 1 is all that the machine can give; None where no floor is known."""

    engine: str
    version: str
    workload: str
    metric: str
    value: float
    unit: str
    share_of_floor: float | None
    median_of: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens in and out; ``--tiny`` makes them small enough to see that every engine works."""

    tokens: int = 128
    prompt: int = 1024
    shared: int = 512
    clients: int = 16

    def items(self, workload: str, seed: int) -> list[Item]:
        """Other seeds are other tokens, so that no cache of prefixes helps from one round to the next."""
        own, one_more = (self.tokens, self.tokens), (16, 16)
        shapes = {
            "w1": Workload(num_requests=1, input_tokens=own, output_tokens=own, seed=seed),
            "w2": Workload(num_requests=self.clients, input_tokens=own, output_tokens=own, seed=seed),
            "w3": Workload(num_requests=1, input_tokens=(self.prompt, self.prompt), output_tokens=(1, 1), seed=seed),
            "w4": Workload(
                num_requests=self.clients,
                input_tokens=one_more,
                output_tokens=one_more,
                num_shared_tokens=self.shared,
                seed=seed,
            ),
        }
        return shapes[{"w4_off": "w4", "w5": "w2"}.get(workload, workload)].items()


@dataclass(slots=True)
class Contestant:
    """An engine at one precision, and what it has done so far: the traces of its runs by workload."""

    engine: str
    quantization: str
    runner: Worker | Served
    runs: dict[str, list[list[Trace]]] = field(default_factory=dict)
    peak_rss_mib: float = 0.0
    _last_s: dict[str, float] = field(default_factory=dict)
    _broken: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine} {'16-bit' if self.quantization == 'none' else self.quantization}"

    def can_run(self, workload: str) -> bool:
        """w4_off is nanoserve's alone; w5 needs a server, which llama.cpp's worker is itself."""
        if isinstance(self.runner, Served):
            return workload == "w5"
        if workload == "w5":
            return self.engine == "llama_cpp"
        return workload != "w4_off" or self.engine == "nanoserve"

    def measure(self, workload: str, items: Sequence[Item], end: float) -> None:
        """One run, unless the last one of its kind took longer than is left until ``end``."""
        if self._broken or time.monotonic() + self._last_s.get(workload, 0.0) >= end:
            return
        start = time.monotonic()
        if traces := self.try_out(items, end, prefix_cache=workload != "w4_off"):
            self.runs.setdefault(workload, []).append(traces)
            self._last_s[workload] = time.monotonic() - start
            print(f"{self.name} {workload}: {self._last_s[workload]:.2f} s", flush=True)

    def try_out(self, items: Sequence[Item], end: float, *, prefix_cache: bool = True) -> list[Trace]:
        """A run that does not count; none when the engine fails, which then is out."""
        timeout_s = max(end - time.monotonic(), 1.0) + _GRACE_S
        try:
            traces = self.runner.run(items, prefix_cache=prefix_cache, timeout_s=timeout_s)
            if any(len(t.token_times_s) != i.num_output_tokens for t, i in zip(traces, items, strict=True)):
                raise WorkerFailed("it made more or fewer tokens than asked")
        except WorkerFailed as error:
            print(f"{self.name} is out: {error}", flush=True)
            self._broken = True
            return []
        return traces

    def weigh(self) -> None:
        self.peak_rss_mib = 0.0 if self._broken else self.runner.peak_rss_mib()


def main() -> None:
    """The command line: load, take turns, print the table, write the rows."""
    args = _arguments()
    deadline = time.monotonic() + args.budget_s
    _ensure_checkpoint(args.model, args.shape)
    machine, work = measure(args.threads), read_work(args.model)
    contestants = list[Contestant]()
    shares = {q: share for q, share in _BUDGET_SHARES.items() if q in args.quantizations}
    while shares:
        left = sum(shares.values())
        quantization, share = next(iter(shares.items()))
        contestants += _compete(args, quantization, time.monotonic() + (deadline - time.monotonic()) * share / left)
        del shares[quantization]
        machine = machine.best(measure(args.threads))
        rows = _machine_rows(machine) + [row for c in contestants for row in _rows(c, machine, work, args.sizes)]
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(_table(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder; built when missing")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b", help="shape of a checkpoint that is built")
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--quantizations", nargs="+", choices=_BUDGET_SHARES, default=list(_BUDGET_SHARES))
    parser.add_argument("--workloads", nargs="+", choices=_WORKLOADS, default=list(_WORKLOADS))
    parser.add_argument("--peer-env", action="append", default=[], metavar="ENGINE=FOLDER", help="a peer's environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=1200.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a few tokens: does every engine work at all?")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    args.model = args.model.absolute()
    args.sizes = Sizes(8, 64, 32, 4) if args.tiny else Sizes()
    args.pythons = _pythons(parser, args.peer_env)
    return args


def _pythons(parser: argparse.ArgumentParser, environments: Sequence[str]) -> dict[str, Path]:
    """Every engine that can run, with the Python that runs it."""
    pythons = dict.fromkeys(_HERE, Path(sys.executable))
    for given in environments:
        engine, _, folder = given.partition("=")
        python = Path(folder).absolute() / "bin" / "python"
        if engine not in ENGINES or not python.exists():
            parser.error(f"--peer-env is ENGINE=FOLDER with a bin/python in FOLDER. Given: {given}")
        pythons[engine] = python
    return pythons


def _ensure_checkpoint(folder: Path, shape: str) -> None:
    if not (folder / "config.json").exists():
        write_checkpoint(SHAPES[shape], random_weights(SHAPES[shape], 0), folder, tokenizer=_DEMO)


def _compete(args: argparse.Namespace, quantization: str, end: float) -> list[Contestant]:
    """Workers take turns and are closed, then servers do; w5 gets a quarter of the time."""
    settings = Settings(
        folder=str(args.model),
        converted=str(args.model),
        quantization=quantization,
        num_threads=args.threads,
        kv_bytes=2 << 30,
        max_model_len=2048,
    )
    engines = [name for name in args.only if quantization in ENGINES[name] and name in args.pythons]
    serving_s = (end - time.monotonic()) / 4 if "w5" in args.workloads else 0.0
    contestants = []
    for start, until in ((_start_worker, end - serving_s), (_start_server, end)):
        with ExitStack() as stack:
            present = []
            for engine in engines:
                try:
                    runner = start(stack, engine, args, settings)
                except WorkerFailed as error:
                    print(f"{engine} {quantization} does not start: {error}", flush=True)
                    continue
                if runner is not None:
                    present.append(Contestant(engine, quantization, runner))
            _take_turns(present, args, until)
        contestants += present
    return contestants


def _start_worker(
    stack: ExitStack, engine: str, args: argparse.Namespace, settings: Settings
) -> Worker | Served | None:
    if args.workloads == ["w5"] and engine in _SERVERS:
        return None
    worker = Worker(engine, args.pythons[engine], settings)
    stack.callback(worker.close)
    return worker


def _start_server(
    stack: ExitStack, engine: str, args: argparse.Namespace, settings: Settings
) -> Worker | Served | None:
    if "w5" not in args.workloads or engine not in _SERVERS:
        return None
    return stack.enter_context(_SERVERS[engine](args.pythons[engine], settings))


def _take_turns(contestants: list[Contestant], args: argparse.Namespace, end: float) -> None:
    """Round by round, workload by workload, engine after engine; what would not end in time is left out."""
    for contestant in contestants:
        contestant.try_out(Sizes(4, 16, 16, args.sizes.clients).items("w2", 0), end)
    for number in range(args.rounds):
        for workload in args.workloads:
            for contestant in contestants:
                if contestant.can_run(workload):
                    contestant.measure(workload, args.sizes.items(workload, number + 1), end)
    for contestant in contestants:
        contestant.weigh()


def _machine_rows(machine: Machine) -> list[Row]:
    figures = (("read", machine.read, "B/s"), ("bf16", machine.bf16, "FLOP/s"), ("int8", machine.int8, "OP/s"))
    return [
        Row(
            engine="machine",
            version="",
            workload="floor",
            metric=name,
            value=value,
            unit=unit,
            share_of_floor=1.0,
            median_of=1,
        )
        for name, value, unit in figures
    ]


def _rows(contestant: Contestant, machine: Machine, work: Work, sizes: Sizes) -> list[Row]:
    """Medians over the runs of each workload, and the peak of memory."""

    def row(workload: str, metric: str, values: Sequence[float], unit: str, share: float | None = None) -> Row:
        return Row(
            engine=contestant.name,
            version=contestant.runner.version,
            workload=workload,
            metric=metric,
            value=statistics.median(values),
            unit=unit,
            share_of_floor=share,
            median_of=len(values),
        )

    rows = []
    for workload, runs in contestant.runs.items():
        items = sizes.items(workload, 1)
        figures = [_figures(run, items) for run in runs]
        least_s = _least_s(workload, items, contestant.quantization, machine, work, sizes)
        for metric, unit in _METRICS.items():
            values = [figure[metric] for figure in figures if metric in figure]
            if values:
                share = least_s / statistics.median(f["wall"] for f in figures) if metric == _MAIN[workload] else None
                rows.append(row(workload, metric, values, unit, share))
    if contestant.peak_rss_mib:
        where = "server" if isinstance(contestant.runner, Served) else "offline"
        rows.append(row(where, "peak_rss", [contestant.peak_rss_mib], "MiB"))
    return rows


def _figures(traces: Sequence[Trace], items: Sequence[Item]) -> dict[str, float]:
    """Of one run; percentiles of intervals only where there are several tokens."""
    found = summary(traces)
    figures = {
        "wall": found["wall_s"],
        "output": found["output_tokens_per_s"],
        "prompt": sum(len(item.prompt_token_ids) for item in items) / found["wall_s"],
        "ttft_p50": found["ttft_p50_ms"],
    }
    if items[0].num_output_tokens > 1:
        figures |= {"itl_p50": found["itl_p50_ms"], "itl_p99": found["itl_p99_ms"]}
    return figures


def _least_s(
    workload: str, items: Sequence[Item], quantization: str, machine: Machine, work: Work, sizes: Sizes
) -> float:
    """The floor of a whole workload: each prompt token computed once (shared ones once for all), then its steps."""
    length, count = len(items[0].prompt_token_ids), items[0].num_output_tokens
    shared = sizes.shared if workload == "w4" else 0
    num_tokens = shared + len(items) * (length - shared)
    prefill_s = work.prefill_s(machine, quantization, num_tokens=num_tokens, length=length)
    context = length + count // 2
    return prefill_s + (count - 1) * work.decode_s(machine, quantization, batch=len(items), context=context)


def _table(rows: Sequence[Row]) -> str:
    lines = ["| engine | workload | metric | median | unit | of floor | runs |", "| --- " * 7 + "|"]
    for row in rows:
        share = "" if row.share_of_floor is None else f"{row.share_of_floor:.0%}"
        cells = (f"{row.engine} {row.version}", row.workload, row.metric, f"{row.value:.4g}", row.unit, share)
        lines.append(f"| {' | '.join(cells)} | {row.median_of} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
