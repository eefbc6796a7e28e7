"""``nanoserve bench`` on an engine in this process and on the service's own HTTP app."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanoserve.cli import main
from nanoserve.cli.bench import table
from nanoserve.cli.bench_targets import HttpTarget, _counts
from nanoserve.core.errors import NanoserveError
from nanoserve.observe.load import open_loop
from nanoserve.observe.workloads import Workload
from nanoserve.serving.http import HttpConfig, build_app
from tests.cases.conftest import Serve, rig, serve
from tests.cases.rig import Rig
from tests.serving.loopback import listening

__all__ = ["rig", "serve"]
SMALL = ["--requests", "6", "--input-tokens", "4:20", "--output-tokens", "3:9", "--shared-tokens", "16"]


def test_a_model_in_this_process(rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    flags = ["--kv-cache-memory", "1MiB", "--max-model-len", "64", "--num-threads", "1", "--output", str(output)]
    for loop in (["--concurrency", "2"], ["--rate", "inf"]):
        assert main(["bench", str(rig.sens()), *SMALL, *flags, *loop]) == 0
        record = json.loads(output.read_text())
        assert (record["num_done"], record["num_failed"], record["errors"]) == (6, 0, [])
        items = Workload(num_requests=6, input_tokens=(4, 20), output_tokens=(3, 9), num_shared_tokens=16).items()
        assert record["throughput"]["output_tokens"] == sum(item.num_output_tokens for item in items)
        assert record["throughput"]["input_tokens"] == sum(len(item.prompt_token_ids) for item in items)
        assert set(record["latency"]) == {"ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"}
        assert record["latency"]["e2e_ms"]["p50"] > record["latency"]["ttft_ms"]["p50"] > 0
        assert record["loop"] == {loop[0].removeprefix("--"): "inf" if "inf" in loop else 2}
        printed = capsys.readouterr().out
        assert "output_tokens_per_s" in printed
        assert "p99" in printed
    assert main(["bench", str(rig.sens()), *SMALL, *flags, "--output-tokens", "60", "--warmup", "0"]) == 1
    assert "6 failed" in (printed := capsys.readouterr().out)
    assert "failed: The prompt" in printed or "failed: Asked for 60" in printed


async def test_a_service_over_http(rig: Rig, serve: Serve) -> None:
    workload = Workload(num_requests=8, input_tokens=(4, 20), output_tokens=(1, 20), seed=3)
    async with serve(rig.sens()) as service, listening(build_app(service.door, HttpConfig())) as port:
        target = HttpTarget(httpx.URL(f"http://127.0.0.1:{port}"), {}, "team/case")
        outcomes = await open_loop(target, workload.items(), [0.0] * 8)
        assert [outcome.error for outcome in outcomes] == [""] * 8
        unknown = HttpTarget(httpx.URL(f"http://127.0.0.1:{port}"), {}, "other")
        assert "not served here" in (await open_loop(unknown, workload.items()[:1], [0.0]))[0].error
        await target.close()
        await unknown.close()
    gone = HttpTarget(httpx.URL(f"http://127.0.0.1:{port}"), {}, "team/case")
    assert "connection" in (await open_loop(gone, workload.items()[:1], [0.0]))[0].error
    await gone.close()


async def test_the_command_on_a_service(rig: Rig, serve: Serve, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    async with serve(rig.sens()) as service, listening(build_app(service.door, HttpConfig())) as port:
        words = ["bench", "--url", f"http://127.0.0.1:{port}/v1", *SMALL, "--rate", "100", "--output", str(output)]
        assert await asyncio.to_thread(main, words) == 0
    record = json.loads(output.read_text())
    assert (record["num_done"], record["num_failed"], record["loop"]) == (6, 0, {"rate": "100.0"})
    assert record["about"]["model"] == "team/case"


async def counted(*events: dict[str, Any]) -> list[int]:
    async def body() -> AsyncIterator[bytes]:
        for event in events:
            yield b": ping\n\ndata: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    return [count async for count in _counts(httpx.Response(200, content=body()))]


async def test_tokens_are_counted_by_usage_or_by_event() -> None:
    choices = [{"text": "a"}]
    told: list[dict[str, Any]] = [{"choices": choices, "usage": {"completion_tokens": n}} for n in (1, 1, 4)]
    assert await counted(*told, {"choices": [], "usage": {"completion_tokens": 4}}) == [1, 3]
    untold: list[dict[str, Any]] = [{"choices": choices}, {"choices": choices, "usage": None}]
    assert await counted(*untold, {"choices": [], "usage": {"completion_tokens": 2}}) == [1, 1]
    with pytest.raises(NanoserveError, match="It broke"):
        await counted({"choices": choices}, {"error": {"message": "It broke."}})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--requests", "0"), "--requests"),
        (("--concurrency", "0"), "--concurrency"),
        (("--rate", "-1"), "--rate"),
        (("--rate", "nan"), "--rate"),
        (("--slo-ttft-ms", "0"), "--slo-ttft-ms"),
        (("--output", "/no/such/folder/x.json"), "/no/such/folder"),
        (("--url", "http://127.0.0.1:1", "--dtype", "float32"), "dtype"),
        (("/no/such/model",), "/no/such/model"),
    ],
)
def test_flags_that_cannot_work(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str) -> None:
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
    assert named in printed.err


@pytest.mark.parametrize("text", ["x", "0:4", "9:4", "", "1:2:3"])
def test_ranges_that_are_none(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--input-tokens", text])
    assert caught.value.code == 2
    assert "--input-tokens" in capsys.readouterr().err


def test_a_service_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_the_table_shows_three_digits() -> None:
    shown = table(
        {"wall_s": 1234.567, "good_share": 0.98765, "none": 0.0}, {"itl_ms": dict.fromkeys(_COLUMNS, 0.01234)}
    )
    assert [line.split()[-1] for line in shown.splitlines()[:3]] == ["1235", "0.988", "0"]
    assert shown.splitlines()[-1].split() == ["itl_ms", *["0.0123"] * 4]


_COLUMNS = ("mean", "p50", "p90", "p99")
