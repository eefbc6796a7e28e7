"""Real processes of a real cluster are killed and frozen while the demo model answers: what a client sees of it.

Sixteen greedy and sixteen seeded streams run on two engines; each has to be what it is when nothing happens.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.cluster import Cluster, cluster
from benchmarks.soak import Tally, answer

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(280)]

ARGS: dict[str, Any] = {
    "model": "demo",
    "num_replicas": 2,
    "num_routers": 1,
    "num_threads": 1,
    "num_cpus": 0.1,
    "kv_cache_memory": "64MiB",
    "max_num_seqs": 64,
    "drain_s": 20,
}
NUM_STREAMS = 32


def body(index: int, max_tokens: int) -> dict[str, object]:
    """The first half greedy, the others seeded; with thoughts and without."""
    how: dict[str, object] = {"temperature": 0} if index < NUM_STREAMS // 2 else {"temperature": 0.9, "seed": index}
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"What is {index + 11} + {7 + index % 9}? Tell me a story."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": bool(index % 2)},
        **how,
    }


class Bench:
    """A cluster, and the undisturbed answers by length."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._undisturbed: dict[int, list[str]] = {}

    async def ask(self, max_tokens: int, tally: Tally) -> list[str]:
        """All streams at once; each has to end well."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.cluster.url, timeout=100, limits=limits) as client:
            bodies = [body(index, max_tokens) for index in range(NUM_STREAMS)]
            return await asyncio.gather(*[answer(client, each, tally) for each in bodies])

    def check(self, max_tokens: int, fault: Callable[[], object], after_tokens: int = 200) -> Tally:
        """Runs all streams with a fault in the middle, and compares each with its undisturbed answer."""
        return asyncio.run(self._check(max_tokens, fault, after_tokens))

    async def _check(self, max_tokens: int, fault: Callable[[], object], after_tokens: int) -> Tally:
        if max_tokens not in self._undisturbed:
            self._undisturbed[max_tokens] = await self.ask(max_tokens, Tally())
        tally = Tally()
        asked = asyncio.create_task(self.ask(max_tokens, tally))
        while tally.num_tokens < after_tokens and not asked.done():  # noqa: ASYNC110  (a count has no event)
            await asyncio.sleep(0.01)
        assert not asked.done(), "the streams ended before the fault"
        await asyncio.to_thread(fault)
        assert await asked == self._undisturbed[max_tokens]
        print(f"\nlongest gap in a stream: {tally.longest_silence_s:.2f} s")
        return tally

    def settle(self) -> None:
        """Two engines, nothing running, every block free."""
        self.cluster.wait()
        give_up_s = time.monotonic() + 30
        while not self._is_idle():
            assert time.monotonic() < give_up_s, "requests or blocks were left behind"
            time.sleep(0.2)

    def _is_idle(self) -> bool:
        try:
            gauges = self.cluster.gauges()
        except httpx.HTTPError:
            return False
        busy = gauges["nanoserve_requests_running"] + gauges["nanoserve_requests_waiting"]
        return not busy and gauges["nanoserve_kv_blocks_free"] == gauges["nanoserve_kv_blocks"]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with cluster() as started:
        started.deploy(**ARGS)
        started.wait()
        yield Bench(started)


@pytest.fixture(autouse=True)
def _settled(bench: Bench) -> Iterator[None]:
    bench.settle()
    yield
    bench.settle()


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_killed_engine_costs_no_stream_a_token(bench: Bench) -> None:
    tally = bench.check(200, lambda: kill(bench.cluster.engines()[:1]))
    assert tally.longest_silence_s < 10


def test_both_engines_killed_one_after_the_other_cost_no_stream_a_token(bench: Bench) -> None:
    def fault() -> None:
        first, second = bench.cluster.engines()
        kill([first])
        while len(set(bench.cluster.engines()) - {first, second}) < 1:
            time.sleep(0.2)
        kill([second])

    bench.check(600, fault)


def test_a_frozen_engine_loses_its_streams_to_the_other(bench: Bench) -> None:
    """It is silent, not dead: nobody's connection breaks, so only the heartbeat tells."""
    (frozen, _) = bench.cluster.engines()
    try:
        tally = bench.check(200, lambda: os.kill(frozen, signal.SIGSTOP))
    finally:
        kill([frozen])
    assert tally.longest_silence_s < 20


def test_a_killed_controller_is_not_noticed(bench: Bench) -> None:
    tally = bench.check(200, lambda: kill(bench.cluster.pids("ServeController")))
    assert tally.longest_silence_s < 10


def test_a_redeploy_under_load_cuts_nothing_and_refuses_nothing(bench: Bench) -> None:
    """New engines and new routers take the place of the old ones, which finish what they have."""
    old = bench.cluster.engines()
    changed = ARGS | {"max_num_seqs": 48}
    bench.check(600, lambda: bench.cluster.deploy(**changed))
    bench.cluster.wait()
    asyncio.run(bench.ask(20, Tally()))
    assert not set(old) & set(bench.cluster.engines())
    bench.cluster.deploy(**ARGS)
    bench.cluster.wait()


def test_scaling_down_lets_the_streams_of_the_leaving_engine_finish(bench: Bench) -> None:
    bench.check(400, lambda: bench.cluster.deploy(**ARGS | {"num_replicas": 1}))
    bench.cluster.deploy(**ARGS)
    bench.cluster.wait()


@pytest.mark.parametrize("name", ["haproxy\0", "ServeReplica:app:Router"])
def test_who_kills_the_way_in_cuts_its_streams_and_the_engines_forget_them(bench: Bench, name: str) -> None:
    """The connections are gone with the process that held them: clients see a stream without [DONE] and ask again."""

    async def cut() -> list[str | BaseException]:
        tally = Tally()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=bench.cluster.url, timeout=100, limits=limits) as client:
            asked = [asyncio.create_task(answer(client, body(index, 600), tally)) for index in range(NUM_STREAMS)]
            while tally.num_tokens < 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            kill(bench.cluster.pids(name))
            return await asyncio.gather(*asked, return_exceptions=True)

    ends = asyncio.run(cut())
    assert all(isinstance(end, httpx.HTTPError | RuntimeError) for end in ends)
    bench.settle()
    assert all(asyncio.run(bench.ask(20, Tally())))


def test_a_lost_node_costs_no_stream_a_token() -> None:
    """Each of two nodes has room for one engine; the raylet of the second is killed, and its engine dies with it."""
    with cluster() as target:
        target.deploy(**ARGS | {"num_cpus": 2})
        while len(target.engines()) < 1 or not target.routers():
            time.sleep(0.2)
        far = target.add_node()
        target.wait()
        bench = Bench(target)
        raylets = set(target.pids("raylet/raylet")) & set(far)
        assert len(raylets) == 1
        bench.check(300, lambda: kill(list(raylets)))
        assert len(target.engines()) == 1
