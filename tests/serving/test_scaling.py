"""Engines come and go by what they report: a burst, an idle time, to zero and back, and no stream is cut."""

import asyncio
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
    "min_replicas": 0,
    "max_replicas": 2,
    "upscale_delay_s": 1,
    "downscale_delay_s": 4,
    "num_threads": 1,
    "num_cpus": 0.1,
    "kv_cache_memory": "64MiB",
    "max_num_seqs": 4,
    "drain_s": 2,
}


@pytest.fixture(scope="module")
def target() -> Iterator[Cluster]:
    with cluster() as started:
        started.deploy(**ARGS)
        started.wait()
        yield started


async def ask(target: Cluster, count: int, max_tokens: int) -> list[str | BaseException]:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(base_url=target.url, timeout=120) as client:
        return await asyncio.gather(*[answer(client, body, Tally()) for _ in range(count)], return_exceptions=True)


def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """How many seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + timeout_s, "it did not happen in time"
        time.sleep(0.1)
    return time.monotonic() - began


def test_a_burst_brings_a_second_engine_and_an_idle_time_takes_all_and_the_next_request_one_back(
    target: Cluster,
) -> None:
    (alone,) = asyncio.run(ask(target, 1, 900))

    async def burst() -> float:
        asked = asyncio.create_task(ask(target, 24, 900))
        seconds = await asyncio.to_thread(until, lambda: len(target.engines()) == 2, 15)
        assert set(await asked) == {alone}
        return seconds

    print(f"\nsecond engine started after {asyncio.run(burst()):.1f} s")
    print(f"none left after {until(lambda: not target.engines(), 60):.1f} s")
    assert httpx.get(f"{target.url}/health").status_code == 200, "asleep is not ill"
    began = time.monotonic()
    assert asyncio.run(ask(target, 3, 900)) == [alone] * 3
    print(f"three answers from nothing after {time.monotonic() - began:.1f} s")


def test_a_router_that_goes_ends_long_streams_with_an_error_event(target: Cluster) -> None:
    """Two routers become one while long streams run: none is cut without a word."""
    target.deploy(**ARGS | {"num_routers": 2})
    target.wait()
    until(lambda: len(target.routers()) == 2, 60)

    async def scale_down() -> list[str | BaseException]:
        asked = asyncio.create_task(ask(target, 4, 3500))
        await asyncio.sleep(2)
        assert not asked.done()
        await asyncio.to_thread(target.deploy, **ARGS | {"num_routers": 1, "drain_s": 1})
        return await asked

    ends = asyncio.run(scale_down())
    errors = [end for end in ends if isinstance(end, BaseException)]
    assert all("shutting down before the answer was finished" in str(error) for error in errors), errors
    assert errors, "the streams ended before the drain did"
