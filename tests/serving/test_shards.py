"""Two engines of two ranks each, over Ray: what becomes of streams when a shard or a replica is lost."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanoserve.model.kernels.native import library
from nanoserve.serving import processes
from tests.serving.service import Service, left_over, until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(library() is None, reason="bits that repeat on another replica need the native kernels"),
]

NUM_TOKENS = 500
BODIES: list[dict[str, Any]] = [
    {"prompt": [number, 40 + number, 7], "seed": number, "temperature": 0.0 if number % 2 else 0.9}
    for number in range(1, 9)
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(
        tmp_path_factory.mktemp("shards"),
        proxy="auto",
        import_path="nanoserve.serving:build",
        model="demo",
        num_replicas=2,
        tensor_parallel_size=2,
        dtype="float32",
        deterministic=True,
        max_num_seqs=8,
        max_model_len=1024,
        kv_cache_memory="32MiB",
        drain_s=5.0,
    )
    try:
        service.wait_for("Ready")
        yield service
    finally:
        service.make_sure_it_is_gone()


async def answer(service: Service, body: dict[str, Any], progress: dict[int, int]) -> list[int]:
    """All tokens of a stream that has to end well."""
    wanted = body | {"model": "demo", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    token_ids: list[int] = []
    reason = None
    async with (
        httpx.AsyncClient(timeout=90) as client,
        client.stream("POST", f"{service.url}/v1/completions", json=wanted | {"return_token_ids": True}) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                token_ids += choice.get("token_ids") or []
                reason = choice["finish_reason"] or reason
                progress[body["seed"]] = len(token_ids)
    assert (reason, len(token_ids)) == ("length", NUM_TOKENS)
    return token_ids


async def answers(service: Service, progress: dict[int, int] | None = None) -> list[list[int]]:
    seen: dict[int, int] = {} if progress is None else progress
    return await asyncio.gather(*[answer(service, body, seen) for body in BODIES])


@pytest.fixture(scope="module")
def undisturbed(service: Service) -> list[list[int]]:
    return asyncio.run(answers(service))


def running(service: Service, title: bytes) -> list[int]:
    """Process ids of the run whose title begins so."""
    found = []
    for pid in processes.of_run(service.run_dir()):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title):
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def shards(service: Service) -> list[int]:
    return running(service, b"ray::Shard")


def engines(service: Service) -> list[int]:
    return running(service, b"ray::ServeReplica:fake:Engine")


def health(service: Service) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(f"{service.url}/health", timeout=10).json()
    return body


def is_logged(service: Service, line: str) -> bool:
    logs = service.run_dir() / "session_latest" / "logs"
    return any(line in path.read_text(errors="replace") for path in logs.rglob("*.*") if path.is_file())


def serve_again(service: Service) -> bool:
    states = [engine["state"] for engine in health(service)["engines"]]
    return len(shards(service)) == 2 and states in (["idle", "idle"], ["running", "idle"], ["idle", "running"])


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "shard 1 died"), (signal.SIGSTOP, "shard 1 did not answer for")],
)
async def test_streams_go_on_when_a_shard_is_lost(
    service: Service, undisturbed: list[list[int]], number: signal.Signals, reason: str
) -> None:
    await until(lambda: serve_again(service), timeout_s=90)
    moved = service.metric("nanoserve_door_resubmits_total")
    progress: dict[int, int] = {}
    asked = asyncio.create_task(answers(service, progress))
    await until(lambda: len(progress) == len(BODIES) and min(progress.values()) > 20)
    os.kill(shards(service)[0], number)
    assert max(progress.values()) < NUM_TOKENS
    assert await asked == undisturbed
    assert service.metric("nanoserve_door_resubmits_total") - moved == len(BODIES) / 2
    assert reason in health(service)["last_lost"]["reason"]
    assert is_logged(service, f"shard lost rank=1 reason={reason.removeprefix('shard 1 ')}")
    await until(lambda: serve_again(service), timeout_s=90)


async def test_a_shard_goes_with_its_replica(service: Service, undisturbed: list[list[int]]) -> None:
    await until(lambda: serve_again(service), timeout_s=90)
    before = shards(service)
    os.kill(engines(service)[0], signal.SIGKILL)
    await until(lambda: len(set(before) & set(shards(service))) == 1, timeout_s=10)
    await until(lambda: serve_again(service), timeout_s=90)
    assert await answers(service) == undisturbed


async def test_the_end_leaves_nothing(service: Service) -> None:
    """Last in the file: it ends the service."""
    run_dir = service.run_dir()
    assert len(shards(service)) == 2
    assert await asyncio.to_thread(service.stop) == 0
    await until(lambda: left_over(run_dir) == [], timeout_s=5)
    assert not run_dir.exists()
