"""Measure nanoserve's engine offline and over HTTP, and transformers beside it in the same run.

python -m benchmarks.engine --model FOLDER --workload mixed16 --peer transformers
python -m benchmarks.engine --url http://127.0.0.1:8000 --workload chat64
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from benchmarks.report import Trace, summary, table, write
from benchmarks.workloads import WORKLOADS, Item
from nanoserve.core.config import EngineArgs
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams

Runner = Callable[[Sequence[Item]], list[Trace]]


def main() -> None:
    """Run the chosen workload ``--repeat`` times in turn on every engine; print a table and write JSON."""
    args = _arguments()
    items = WORKLOADS[args.workload].items()
    runs: dict[str, list[dict[str, float]]] = {}
    engines = _engines(args)
    for repeat in range(args.repeat + args.warmup):
        for name, run in engines.items():
            figures = summary(run(items))
            if repeat >= args.warmup:
                runs.setdefault(name, []).append(figures)
    best = {name: max(results, key=lambda r: r["output_tokens_per_s"]) for name, results in runs.items()}
    print(table(best))
    record: dict[str, object] = {"workload": args.workload, "dtype": args.dtype, "best": best, "runs": runs}
    if "transformers" in best:
        ratio = best["nanoserve"]["output_tokens_per_s"] / best["transformers"]["output_tokens_per_s"]
        record["ratio_to_transformers"] = ratio
        print(f"\nnanoserve / transformers: {ratio:.2f} x output tokens per second")
    print(f"written: {write(args.name or f'engine_{args.workload}', record).name}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint folder, hub id or demo")
    parser.add_argument("--url", help="measure a running service instead of the engine in this process")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="mixed16")
    parser.add_argument("--peer", choices=["none", "transformers"], default="none")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--name", help="name of the result file")
    return parser.parse_args()


def _engines(args: argparse.Namespace) -> dict[str, Runner]:
    if args.url:
        return {"nanoserve over HTTP": lambda items: asyncio.run(over_http(args.url, items))}
    engines: dict[str, Runner] = {"nanoserve": Offline(EngineArgs(model=args.model, dtype=args.dtype)).run}
    if args.peer == "transformers":
        import torch

        from benchmarks.peers import TransformersPeer
        from nanoserve.model.folder import resolve_model

        dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
        engines["transformers"] = TransformersPeer(Path(resolve_model(args.model)), dtype).run
    return engines


class Offline:
    """The engine in this process: every request at once, stepped until all are done, prefix cache cold for each run."""

    def __init__(self, args: EngineArgs) -> None:
        from nanoserve.model.build import build

        self._loaded = build(replace(args, max_num_seqs=256))
        self._run = 0

    def run(self, items: Sequence[Item], *, prefix_cache: bool = True) -> list[Trace]:
        from nanoserve.engine.core import EngineCore

        self._run += 1
        scheduling = replace(self._loaded.scheduler, enable_prefix_caching=prefix_cache)
        core = EngineCore(self._loaded.runner, scheduling, cache_salt=str(self._run))
        times: dict[str, list[float]] = {}
        start = time.perf_counter()
        for index, item in enumerate(items):
            times[f"{self._run}-{index}"] = []
            core.add(_request(f"{self._run}-{index}", item))
        while core.has_work:
            update = core.step()
            now = time.perf_counter()
            for output in update.outputs:
                times[output.request_id] += [now] * len(output.new_token_ids)
        return [Trace(sent_s=start, token_times_s=tuple(stamps)) for stamps in times.values()]


def _request(request_id: str, item: Item) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=item.num_output_tokens, ignore_eos=True, seed=0)
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=item.prompt_token_ids, sampling=sampling, arrival_s=time.time()
    )


async def over_http(url: str, items: Sequence[Item]) -> list[Trace]:
    """Every request at once as a token-id completion stream; raises when one fails or brings too few tokens."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        model = models["data"][0]["id"]
        return list(await asyncio.gather(*(stream(client, model, item) for item in items)))


async def stream(client: httpx.AsyncClient, model: str, item: Item) -> Trace:
    body = {
        "model": model,
        "prompt": list(item.prompt_token_ids),
        "max_tokens": item.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    sent, stamps = time.perf_counter(), list[float]()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                count = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", 0)
                stamps += [time.perf_counter()] * (count - len(stamps))
    if len(stamps) != item.num_output_tokens:
        raise RuntimeError(f"asked for {item.num_output_tokens} tokens, got {len(stamps)}")
    return Trace(sent_s=sent, token_times_s=tuple(stamps))


if __name__ == "__main__":
    main()
