"""Starts that fail or are stopped, and what a killed one leaves: a sentence, and nothing."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.service import Service, answer, left_over, until

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(240)]

Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    services: list[Service] = []

    def start(proxy: str = "haproxy", **args: Any) -> Service:
        services.append(Service(tmp_path, proxy=proxy, **args))
        return services[-1]

    yield start
    for service in services:
        service.make_sure_it_is_gone()


async def nothing_is_left(run_dir: Path) -> None:
    await until(lambda: left_over(run_dir) == [], timeout_s=15)


async def test_a_checkpoint_that_cannot_be_loaded_ends_the_start_with_its_own_sentence(start: Start) -> None:
    service = start(model="broken")
    run_dir = Path(service.wait_for("Logs:").split()[1]).parents[1]
    assert service.process.wait(30) == 1
    said = [line for line in service.lines if line.startswith("nanoserve:")]
    assert said == ["nanoserve: model.safetensors: the tensor lm_head.weight is missing."]
    assert not any("Traceback" in line for line in service.lines)
    await nothing_is_left(run_dir)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["Starting Ray", "Loading", "Ready"])
async def test_whenever_it_is_stopped_nothing_is_left(start: Start, moment: str, number: signal.Signals) -> None:
    service = start()
    service.wait_for(moment)
    run_dir = service.run_dir()
    if moment != "Ready":
        await asyncio.sleep(1.5)
    os.kill(service.process.pid, number)
    assert service.process.wait(40) == (-number if number is signal.SIGKILL else 0)
    await nothing_is_left(run_dir)
    await until(lambda: not run_dir.exists())
    assert not any("Traceback" in line for line in service.lines), service.lines


async def test_a_second_signal_hurries(start: Start) -> None:
    service = start(drain_s=60)
    service.wait_for("Ready")
    run_dir = service.run_dir()
    with httpx.stream(
        "POST", f"{service.url}/generate", json={"prompt": [1], "max_tokens": 4000, "seed": 1}, timeout=60
    ) as reply:
        assert next(reply.iter_lines()).startswith("data:")
        os.kill(service.process.pid, signal.SIGINT)
        service.wait_for("Stopping")
        began_s = time.monotonic()
        os.kill(service.process.pid, signal.SIGINT)
        assert service.process.wait(30) == 0
    assert time.monotonic() - began_s < 20
    await nothing_is_left(run_dir)


async def test_any_router_shows_the_metrics_of_all(start: Start) -> None:
    service = start(num_routers=2)
    service.wait_for("Ready")
    await until(lambda: len({service.pids()["router"] for _ in range(8)}) == 2)
    for seed in range(1, 9):
        await answer(service.url, seed, 3)
    for _ in range(4):
        assert service.metric("nanoserve_door_requests_total") == 8
        assert service.metric("nanoserve_requests_finished_total") == 8
        assert service.count("nanoserve_door_requests_open") == 2
