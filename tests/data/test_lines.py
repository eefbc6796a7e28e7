"""A line of a batch file: judged, asked, and written as OpenAI writes it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nanoserve.data import EngineConfig
from nanoserve.data.lines import LineError, LineWorker, error_line, line_id, parse
from tests.data.engines import KILLER, counting_engine


def line(custom_id: object = "a", **changes: Any) -> bytes:
    body = {"model": "demo", "prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
    whole = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(whole | changes).encode()


@pytest.mark.parametrize(
    ("raw", "code", "custom_id"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (line(None), "missing_required_parameter", None),
        (line(""), "missing_required_parameter", None),
        (line(7), "missing_required_parameter", None),
        (line(method="GET"), "invalid_method", "a"),
        (line(url="/v1/nothing"), "invalid_url", "a"),
        (line(url=["/v1/completions"]), "invalid_url", "a"),
        (line(body=None), "missing_required_parameter", "a"),
        (line(body="{}"), "missing_required_parameter", "a"),
        (line(body={"stream": True}), "invalid_request", "a"),
    ],
)
def test_a_line_that_is_no_request(raw: bytes, code: str, custom_id: str | None) -> None:
    with pytest.raises(LineError) as caught:
        parse(raw)
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)
    written = json.loads(error_line("batch_req_1", caught.value))
    assert written.keys() == {"id", "custom_id", "response", "error"}
    assert written["response"] is None
    assert written["error"] == {"code": code, "message": caught.value.message}


def test_an_id_names_line_model_and_occurrence() -> None:
    ids = {line_id(b"a", "m", 0), line_id(b"b", "m", 0), line_id(b"a", "n", 0), line_id(b"a", "m", 1)}
    assert len(ids) == 4
    assert line_id(b"a", "m", 0) in ids


async def ask(folder: Path, *lines: bytes) -> list[dict[str, Any]]:
    """The lines of the output, in the order of the input."""
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    config = EngineConfig(engine_kwargs={"max_num_seqs": 4, "max_queued_requests": 8})
    worker = LineWorker(config, counting_engine, str(path))
    offsets = [sum(len(text) + 1 for text in lines[:index]) for index in range(len(lines))]
    batch = {"id": [f"r{i}" for i in range(len(lines))], "offset": offsets, "length": [len(text) for text in lines]}
    out = await asyncio.wait_for(worker(batch), 60)
    return [json.loads(text) for text in out["line"]]


async def test_a_request_is_answered_as_the_service_answers_it(tmp_path: Path) -> None:
    (answer,) = await ask(tmp_path, line())
    assert (answer["id"], answer["custom_id"], answer["error"]) == ("r0", "a", None)
    response = answer["response"]
    assert response["status_code"] == 200
    assert response["request_id"].startswith("req-")
    assert response["body"]["object"] == "text_completion"
    assert response["body"]["usage"]["completion_tokens"] == 3


async def test_errors_of_the_api_are_responses(tmp_path: Path) -> None:
    body = {"model": "other", "prompt": "x"}
    chat = {"model": "demo", "messages": [{"role": "user"}]}
    unknown, wrong, fine = await ask(
        tmp_path, line("a", body=body), line("b", url="/v1/chat/completions", body=chat), line("c")
    )
    assert unknown["response"]["status_code"] == 404
    assert unknown["response"]["body"]["error"]["code"] == "model_not_found"
    assert unknown["error"] is None
    assert wrong["response"]["status_code"] == 400
    assert "messages[0].content" in wrong["response"]["body"]["error"]["message"]
    assert fine["response"]["status_code"] == 200


async def test_more_lines_than_the_engine_queues_all_get_their_turn(tmp_path: Path) -> None:
    answers = await ask(tmp_path, *[line(f"c{index}") for index in range(60)])
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 60
    assert [answer["custom_id"] for answer in answers] == [f"c{index}" for index in range(60)]


async def test_a_deadly_request_is_an_error_and_its_neighbours_are_answered(tmp_path: Path) -> None:
    deadly = {"model": "demo", "prompt": [KILLER], "max_tokens": 3}
    first, second, third = await ask(tmp_path, line("a"), line("b", body=deadly), line("c"))
    assert [first["response"]["status_code"], third["response"]["status_code"]] == [200, 200]
    assert second["response"]["status_code"] == 500
    assert second["response"]["body"]["error"]["type"] == "server_error"
