"""Many streaming clients of mixed lengths for minutes: no error, no stall, every answer equal to its answer alone.

python -m benchmarks.soak --url http://127.0.0.1:8000 --clients 64 --seconds 120

Greedy streams start as others end. Afterwards the running and waiting gauges must be 0 and all blocks free again.
Exits 1 when anything differs. ``--pids`` adds the resident memory of the service's
processes, first and last third compared.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.report import percentile, write

_QUESTIONS = [
    "What is {a} + {b}?",
    "what is {a} - {b}",
    "Tell me a story.",
    "What is the capital of France?",
    "Repeat: {w}",
]
_WORDS = ["river", "stone", "apple", "cloud", "window", "garden", "yellow", "silver"]


@dataclass(slots=True)
class Tally:
    """What happened so far; one event loop changes it."""

    num_streams: int = 0
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    longest_silence_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)


def bodies(count: int, seed: int) -> list[dict[str, object]]:
    """``count`` different greedy chat bodies with mixed lengths; thinking on for every second one."""
    rng, made = random.Random(seed), []
    for index in range(count):
        text = rng.choice(_QUESTIONS).format(
            a=rng.randrange(50), b=rng.randrange(50), w=" ".join(rng.sample(_WORDS, rng.randint(2, 4)))
        )
        made.append(
            {
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": rng.choice([1, 5, 20, 60, 120, 200]),
                "ignore_eos": rng.random() < 0.3,
                "chat_template_kwargs": {"enable_thinking": bool(index % 2)},
            }
        )
    return made


async def answer(client: httpx.AsyncClient, body: dict[str, object], tally: Tally) -> str:
    """The joined text of one stream; raises on an error event, a missing [DONE] or a bad status."""
    text, done, first = [], False, True
    sent = last = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.perf_counter()
            tally.longest_silence_s = max(tally.longest_silence_s, now - last)
            if line == "data: [DONE]":
                done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for choice in event["choices"]:
                delta = choice["delta"]
                piece = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                if piece and first:
                    tally.ttft_s.append(now - sent)
                    first = False
                text.append(piece)
                tally.num_tokens += bool(piece)
            last = now
    if not done:
        raise RuntimeError("the stream ended without [DONE]")
    return "".join(text)


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """The service's metrics by name, summed over replicas."""
    found: dict[str, float] = {}
    for line in (await client.get("/metrics")).raise_for_status().text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.split("{")[0]] = found.get(name.split("{")[0], 0.0) + float(value)
    return found


async def soak(args: argparse.Namespace) -> tuple[Tally, dict[str, float], dict[str, float]]:
    """Answer every body alone, then all of them together until the time is over; the gauges before and after."""
    tally = Tally()
    async with httpx.AsyncClient(base_url=args.url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        prompts = [body | {"model": model} for body in bodies(args.bodies, args.seed)]
        alone = [await answer(client, body, Tally()) for body in prompts]
        before = await gauges(client)
        stop = time.perf_counter() + args.seconds
        clients = [_client(client, prompts, alone, tally, stop, args.seed + k) for k in range(args.clients)]
        await asyncio.gather(_watch_memory(args.pids, tally, stop), *clients)
        await asyncio.sleep(2)
        return tally, before, await gauges(client)


async def _client(
    client: httpx.AsyncClient,
    prompts: list[dict[str, object]],
    alone: list[str],
    tally: Tally,
    stop: float,
    seed: int,
) -> None:
    rng = random.Random(seed)
    while time.perf_counter() < stop:
        index = rng.randrange(len(prompts))
        try:
            text = await answer(client, prompts[index], tally)
        except (httpx.HTTPError, RuntimeError) as error:
            tally.errors.append(f"{type(error).__name__}: {error}")
            continue
        tally.num_streams += 1
        if text != alone[index]:
            tally.errors.append(f"body {index} differs: {text!r:.80} instead of {alone[index]!r:.80}")


async def _watch_memory(pids: list[int], tally: Tally, stop: float) -> None:
    while time.perf_counter() < stop:
        tally.rss_bytes.append(sum(_rss_bytes(pid) for pid in pids))
        await asyncio.sleep(1)


def _rss_bytes(pid: int) -> int:
    path = Path(f"/proc/{pid}/statm")
    return int(path.read_text().split()[1]) * 4096 if path.exists() else 0


def main() -> None:
    """Run the soak, print what happened, write JSON, exit 1 on any fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--bodies", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pids", type=int, nargs="*", default=[])
    args = parser.parse_args()
    tally, before, after = asyncio.run(soak(args))
    faults = list(tally.errors)
    if tally.longest_silence_s > 30:
        faults.append(f"a stream was silent for {tally.longest_silence_s:.1f} s")
    for name in ("nanoserve_requests_running", "nanoserve_requests_waiting"):
        if after.get(name, -1) != 0:
            faults.append(f"{name} is {after.get(name)} at the end")
    if after.get("nanoserve_kv_blocks_free") != before.get("nanoserve_kv_blocks_free"):
        faults.append("not all KV blocks are free at the end")
    third = len(tally.rss_bytes) // 3
    figures: dict[str, object] = {
        "clients": args.clients,
        "seconds": args.seconds,
        "streams": tally.num_streams,
        "chunks": tally.num_tokens,
        "longest_silence_s": round(tally.longest_silence_s, 3),
        "ttft_p50_ms": round(1e3 * percentile(tally.ttft_s, 0.5), 1),
        "ttft_p99_ms": round(1e3 * percentile(tally.ttft_s, 0.99), 1),
        "preemptions": after.get("nanoserve_preemptions_total", 0),
        "rss_first_third_mib": sum(tally.rss_bytes[:third]) / max(third, 1) / 2**20,
        "rss_last_third_mib": sum(tally.rss_bytes[-third:]) / max(third, 1) / 2**20 if third else 0.0,
        "faults": faults[:20],
        "num_faults": len(faults),
    }
    print(json.dumps(figures, indent=2))
    write("soak", figures)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
