"""The whole service over Ray, with each proxy in front: streams, clients that leave, floods, crashes, the end."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoserve.serving import processes
from tests.serving import fakes
from tests.serving.service import RefusedError, Service, answer, asking, left_over, listening, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

MAX_OPEN = 24


@pytest.fixture(scope="module", params=["haproxy", pytest.param("python", marks=pytest.mark.slow)])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(
        tmp_path_factory.mktemp("serve"),
        proxy=request.param,
        num_replicas=2,
        max_open_requests=MAX_OPEN,
        door_grace_s=1.0,
        drain_s=3.0,
    )
    try:
        service.wait_for("Ready")
        yield service
    finally:
        service.make_sure_it_is_gone()


async def test_streams_are_exact(service: Service) -> None:
    await asyncio.gather(*[answer(service.url, seed, 30 + seed) for seed in range(1, 17)])
    assert service.metric("nanoserve_door_requests_open") == 0


async def test_a_client_that_leaves_frees_its_request_before_the_next_step_but_one(service: Service) -> None:
    """In steps, from the engine's own counter: a request that ran on would have generated more by then."""
    aborted = service.metric("nanoserve_requests_aborted_total")
    async with asking(service.url, [5, 5], 3000, 5) as events:
        async for event in events:
            if event["ids"]:
                break
        before = service.metric("nanoserve_generation_tokens_total")
    began_s = time.monotonic()
    await until(lambda: service.metric("nanoserve_requests_running") == 0)
    num_steps = (time.monotonic() - began_s) / fakes.STEP_S
    assert service.metric("nanoserve_requests_aborted_total") == aborted + 1
    assert service.metric("nanoserve_generation_tokens_total") - before <= num_steps + 2
    assert service.metric("nanoserve_kv_blocks_free") == service.metric("nanoserve_kv_blocks")


async def test_a_flood_is_refused_with_the_time_to_come_back(service: Service) -> None:
    progress: list[int] = []
    streams = [asyncio.create_task(answer(service.url, seed, 120, progress)) for seed in range(1, MAX_OPEN + 1)]
    await until(lambda: len(set(progress)) == MAX_OPEN)
    with pytest.raises(RefusedError) as caught:
        await answer(service.url, 99, 5)
    assert caught.value.status == 429
    assert float(caught.value.headers["retry-after"]) > 0
    await asyncio.gather(*streams)


async def test_streams_survive_the_crash_of_an_engine(service: Service) -> None:
    await until(lambda: len(service.pids()["engines"]) == 2)
    moved = service.metric("nanoserve_door_resubmits_total")
    progress: list[int] = []
    streams = [asyncio.create_task(answer(service.url, seed, 150, progress)) for seed in range(1, 13)]
    await until(lambda: len(set(progress)) == 12)
    os.kill(service.pids()["engines"][0], signal.SIGKILL)
    await asyncio.gather(*streams)
    assert service.metric("nanoserve_door_resubmits_total") - moved == 6
    await until(lambda: len(service.pids()["engines"]) == 2)
    await answer(service.url, 3, 5)


async def test_a_poisoned_request_ends_with_an_error_and_the_service_recovers(service: Service) -> None:
    await until(lambda: len(service.pids()["engines"]) == 2)
    async with asking(service.url, [fakes.POISON, 1], 5, 5) as events:
        last = [event async for event in events][-1]
    assert last["finish"] == "error"
    await until(lambda: service.pids()["reason"] is None)
    await answer(service.url, 3, 5)


@pytest.mark.slow
async def test_the_service_recovers_from_the_crash_of_its_router(service: Service) -> None:
    router = service.pids()["router"]
    async with asking(service.url, [5, 5], 3000, 5) as events:
        async for event in events:
            if event["ids"]:
                break
        os.kill(router, signal.SIGKILL)
    await until(lambda: _answers(service, other_than=router), timeout_s=60)
    await until(lambda: service.metric("nanoserve_requests_running") == 0)
    await answer(service.url, 3, 5)


def _answers(service: Service, *, other_than: int) -> bool:
    try:
        return bool(service.pids()["router"] != other_than)
    except Exception:  # whatever a proxy without a backend does
        return False


async def test_nothing_but_ray_listens_beyond_the_loopback(service: Service) -> None:
    found = set()
    pids = service.pids()
    for pid in [pids["router"], *pids["engines"], *_proxies(service)]:
        found |= {(address, port) for address, port in listening(pid) if not _is_rays(pid, port)}
    assert ("127.0.0.1", service.port) in found
    assert {address for address, _ in found} == {"127.0.0.1"}


def _proxies(service: Service) -> list[int]:
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes.of_run(service.run_dir())}
    return [pid for pid, name in names.items() if b"haproxy\0-db" in name or b"ProxyActor" in name]


def _is_rays(pid: int, port: int) -> bool:
    """Ray's own ports carry gRPC guarded by its token; ours answer HTTP."""
    import httpx

    try:
        return not httpx.get(f"http://127.0.0.1:{port}/-/healthz", timeout=2).text
    except httpx.HTTPError:
        return True


async def test_the_end_lets_streams_finish_and_leaves_nothing(service: Service) -> None:
    """Last in the file: it ends the service."""
    run_dir = service.run_dir()
    progress: list[int] = []
    short = asyncio.create_task(answer(service.url, 4, 60, progress))
    async with asking(service.url, [9], 3000, 9) as events:
        await until(lambda: progress != [])
        os.kill(service.process.pid, signal.SIGTERM)
        token_ids, last = [], {}
        async for last in events:
            token_ids += last["ids"]
    assert last["error"][0] == "service_unavailable_error"
    assert token_ids == fakes.expected([9], 9, len(token_ids))
    await short
    assert await asyncio.to_thread(service.process.wait, 30) == 0
    await until(lambda: left_over(run_dir) == [], timeout_s=5)
    assert not run_dir.exists()
    assert "Stopping" in service.lines[-1]
