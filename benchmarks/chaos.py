"""Minutes of kills, redeploys, scaling, leaving clients and slow readers: no wrong token, no lost request, no leak.

python -m benchmarks.chaos --seconds 600 --every 20

A real cluster on this machine (``benchmarks.cluster``) serves the demo model on two engines behind one router. Clients
stream greedy and seeded chats whose answers are known from a quiet round before. Every so often something happens to
the service: an engine is killed or frozen, the controller is killed, the application is redeployed, or scaled to one
or three engines. One client in eight leaves in the middle of its answer, one in eight reads slowly. Routers and HAProxy
are left alone: a connection dies with the process that holds it (``tests/serving/test_faults.py``).

Exits 1 when an answer differs from its quiet one, a request fails (429 is counted apart), a gauge does not return to
zero, a block is not free in the end, or the memory of the service grows by more than a tenth.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from benchmarks.cluster import Cluster, cluster
from benchmarks.report import write
from benchmarks.soak import Tally, answer, bodies

ARGS = {
    "model": "demo",
    "num_replicas": 2,
    "num_threads": 1,
    "num_cpus": 0.1,
    "kv_cache_memory": "64MiB",
    "max_num_seqs": 64,
    "drain_s": 30,
}


@dataclass(slots=True)
class Chaos:
    """What happened so far."""

    tally: Tally = field(default_factory=Tally)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)


def questions(count: int, seed: int) -> list[dict[str, object]]:
    """Greedy and seeded by turns, all of them long enough to be hit."""
    return [
        each | {"model": "demo", "max_tokens": 60 + 20 * (index % 8), "ignore_eos": True}
        if index % 2
        else each | {"model": "demo", "temperature": 0.9, "seed": index, "max_tokens": 200}
        for index, each in enumerate(bodies(count, seed))
    ]


async def client(
    http: httpx.AsyncClient, asked: list[dict[str, object]], quiet: list[str], chaos: Chaos, stop: float, seed: int
) -> None:
    """Asks until the time is over; its kind is its own for good."""
    rng, kind = random.Random(seed), ("leaves", "slow", *["stays"] * 6)[seed % 8]
    while time.perf_counter() < stop:
        index = rng.randrange(len(asked))
        try:
            if kind == "leaves":
                await _leave(http, asked[index], rng.uniform(0.05, 1.0))
            elif kind == "slow":
                _compare(await _read_slowly(http, asked[index]), quiet[index], index, chaos)
            else:
                _compare(await answer(http, asked[index], chaos.tally), quiet[index], index, chaos)
            chaos.counts[kind] += 1
        except (httpx.HTTPError, RuntimeError) as error:
            if "status 429" in str(error):
                chaos.counts["refused with 429"] += 1
                await asyncio.sleep(1)
            else:
                chaos.faults.append(f"{kind} client: {type(error).__name__}: {error}"[:300])


def _compare(text: str, quiet: str, index: int, chaos: Chaos) -> None:
    if text != quiet:
        chaos.faults.append(f"body {index} differs: {text!r:.80} instead of {quiet!r:.80}")


async def _leave(http: httpx.AsyncClient, body: dict[str, object], after_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            await answer(http, body, Tally())


async def _read_slowly(http: httpx.AsyncClient, body: dict[str, object]) -> str:
    """A few bytes at a time with pauses: what it does not take waits in bounded buffers."""
    taken = b""
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}")
        async for piece in response.aiter_raw(512):
            taken += piece
            await asyncio.sleep(0.05)
    text, done = "", False
    for line in taken.decode().splitlines():
        done = done or line == "data: [DONE]"
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                text += (choice["delta"].get("reasoning_content") or "") + (choice["delta"].get("content") or "")
    if not done:
        raise RuntimeError("the stream ended without [DONE]")
    return text


def misfortunes(target: Cluster, rng: random.Random) -> list[tuple[str, Callable[[], object]]]:
    """What can happen, by name."""

    def send(number: int) -> None:
        os.kill(rng.choice(target.engines()), number)

    def freeze() -> None:
        victim = rng.choice(target.engines())
        os.kill(victim, signal.SIGSTOP)
        time.sleep(12)
        os.kill(victim, signal.SIGKILL)

    return [
        ("an engine killed", lambda: send(signal.SIGKILL)),
        ("scaled to three engines", lambda: target.deploy(**ARGS | {"num_replicas": 3})),
        ("an engine killed", lambda: send(signal.SIGKILL)),
        ("redeployed", lambda: target.deploy(**ARGS | {"max_num_seqs": rng.randrange(40, 64)})),
        ("controller killed", lambda: os.kill(target.pids("ServeController")[0], signal.SIGKILL)),
        ("scaled to one engine", lambda: target.deploy(**ARGS | {"num_replicas": 1})),
        ("scaled to two engines", lambda: target.deploy(**ARGS)),
        ("an engine frozen, then killed", freeze),
    ]


async def misfortune(target: Cluster, chaos: Chaos, stop: float, every_s: float, rng: random.Random) -> None:
    """One after the other, each when the service has recovered from the last but not before ``every_s``."""
    turn = 0
    while time.perf_counter() + every_s < stop:
        await asyncio.sleep(every_s)
        kinds = misfortunes(target, rng)
        name, act = kinds[turn % len(kinds)]
        turn += 1
        began = time.perf_counter()
        await asyncio.to_thread(act)
        chaos.counts[name] += 1
        await asyncio.sleep(3)  # Serve has noticed by then
        await asyncio.to_thread(target.wait)
        chaos.rss_bytes.append(await asyncio.to_thread(target.rss_bytes) // max(1, len(target.engines())))
        print(f"{name}; well again after {time.perf_counter() - began:.1f} s", flush=True)


async def run(target: Cluster, args: argparse.Namespace) -> Chaos:
    chaos, rng = Chaos(), random.Random(args.seed)
    asked = questions(args.bodies, args.seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=target.url, timeout=120, limits=limits) as http:
        quiet = await asyncio.gather(*[answer(http, each, Tally()) for each in asked])
        stop = time.perf_counter() + args.seconds
        clients = [client(http, asked, quiet, chaos, stop, seed) for seed in range(args.clients)]
        await asyncio.gather(misfortune(target, chaos, stop, args.every, rng), *clients)
    target.deploy(**ARGS)
    target.wait()
    await asyncio.sleep(8)  # an engine forgets the requests of a door that left after a grace period
    gauges = target.gauges()
    for name in ("nanoserve_requests_running", "nanoserve_requests_waiting"):
        if gauges[name]:
            chaos.faults.append(f"{name} is {gauges[name]} at the end")
    if gauges["nanoserve_kv_blocks_free"] != gauges["nanoserve_kv_blocks"]:
        chaos.faults.append("not all KV blocks are free at the end")
    return chaos


def main() -> None:
    """Run it, print what happened, write JSON, exit 1 on any fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=20, help="seconds between two misfortunes")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--bodies", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with cluster() as target:
        target.deploy(**ARGS)
        target.wait()
        chaos = asyncio.run(run(target, args))
    early, late = chaos.rss_bytes[: len(chaos.rss_bytes) // 3], chaos.rss_bytes[-(len(chaos.rss_bytes) // 3) :]
    growth = (sum(late) / len(late)) / (sum(early) / len(early)) - 1 if early and late else 0.0
    if growth > 0.1:
        chaos.faults.append(f"memory an engine grew by {growth:.0%}")
    figures: dict[str, object] = {
        "seconds": args.seconds,
        "clients": args.clients,
        "counts": dict(chaos.counts),
        "streamed_chunks": chaos.tally.num_tokens,
        "longest_gap_s": round(chaos.tally.longest_silence_s, 2),
        "memory_growth_per_engine": round(growth, 3),
        "faults": chaos.faults[:20],
        "num_faults": len(chaos.faults),
    }
    print(json.dumps(figures, indent=2))
    write("chaos", figures)
    sys.exit(bool(chaos.faults))


if __name__ == "__main__":
    main()
