"""Every mistake and every fault, on every route: OpenAI's envelope and the right status."""

import asyncio
from typing import Any

import pytest

from nanoserve.core.errors import EngineDeadError, InvalidRequestError, QueueFullError, UnavailableError
from nanoserve.core.outputs import FinishReason
from nanoserve.serving import http
from nanoserve.serving.door import Health, ServedModel
from tests.serving.conftest import ClientFor
from tests.serving.replies import events, refused
from tests.serving.scripted_door import ScriptedDoor

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(served: ServedModel, **fields: Any) -> dict[str, Any]:
    return {"model": served.name, "messages": MESSAGES, "max_tokens": 4} | fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": {"role": "user", "content": "hi"}}, "messages"),
        ({"messages": []}, "messages"),
        ({"model": None}, "model"),
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
    ],
)
async def test_a_mistake_is_a_plain_400(
    served: ServedModel, client_for: ClientFor, fields: dict[str, Any], param: str, stream: bool
) -> None:
    door = ScriptedDoor([served], token_ids=[65])
    async with client_for(door) as client:
        response = await client.post("/v1/chat/completions", json=chat(served, stream=stream) | fields)
    refused(response, 400, param)
    assert not door.opened


async def test_stream_options_without_stream_are_refused(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([served])) as client:
        body = chat(served, stream_options={"include_usage": True})
        refused(await client.post("/v1/chat/completions", json=body), 400, "stream_options")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_an_unknown_model_is_404_everywhere(served: ServedModel, client_for: ClientFor, path: str) -> None:
    body = {"model": "/models/on/disk", "messages": MESSAGES, "prompt": "x", "tokens": [1]}
    async with client_for(ScriptedDoor([served])) as client:
        error = refused(await client.post(path, json=body), 404, "model")
    assert error["code"] == "model_not_found"


async def test_without_a_loaded_model_requests_are_503(client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([])) as client:
        response = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
    refused(response, 503)
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "refusal, status",
    [
        (QueueFullError("The queue is full.", retry_after_s=3), 429),
        (UnavailableError("No engine is up."), 503),
        (InvalidRequestError("It can never fit.", param="messages", code="context_length_exceeded"), 400),
        (EngineDeadError("ray::Engine died: /opt/x/y.py"), 500),
        (RuntimeError("a bug"), 500),
    ],
)
async def test_what_the_door_refuses_keeps_its_status(
    served: ServedModel, client_for: ClientFor, refusal: Exception, status: int, stream: bool
) -> None:
    for fields in ({}, {"n": 2}):
        async with client_for(ScriptedDoor([served], refusal=refusal)) as client:
            response = await client.post("/v1/chat/completions", json=chat(served, stream=stream, **fields))
        error = refused(response, status)
        if status == 500:
            assert error["type"] == "server_error"
        if status == 429:
            assert response.headers["retry-after"] == "3"


async def test_all_streams_are_closed_when_one_choice_is_refused(served: ServedModel, client_for: ClientFor) -> None:
    door = ScriptedDoor([served], token_ids=[65])
    open_one = door.open

    async def open_two(request: Any, model: str) -> Any:
        if request.request_id.endswith("-2"):
            await asyncio.sleep(0.02)
            raise QueueFullError("The queue is full.")
        return await open_one(request, model)

    door.open = open_two  # type: ignore[method-assign]
    async with client_for(door) as client:
        refused(await client.post("/v1/chat/completions", json=chat(served, n=4)), 429)
    assert door.streams
    assert all(stream.closed for stream in door.streams)


async def test_a_fault_before_the_first_token_has_a_status_even_when_streaming(
    served: ServedModel, client_for: ClientFor
) -> None:
    door = ScriptedDoor([served], finish=FinishReason.ERROR, error=("timeout_error", "The deadline passed."))
    async with client_for(door) as client:
        refused(await client.post("/v1/chat/completions", json=chat(served, stream=True)), 504)
        refused(await client.post("/v1/chat/completions", json=chat(served)), 504)


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
@pytest.mark.parametrize(
    "finish, error, type_",
    [
        (FinishReason.ERROR, ("server_error", "Traceback (most recent call last)"), "server_error"),
        (FinishReason.ABORT, None, "service_unavailable_error"),
    ],
)
async def test_a_fault_in_mid_stream_is_an_event_and_the_end(
    served: ServedModel, client_for: ClientFor, finish: FinishReason, error: Any, type_: str, fields: dict[str, Any]
) -> None:
    door = ScriptedDoor([served], token_ids=[65, 66], finish=finish, error=error)
    async with client_for(door) as client:
        response = await client.post("/v1/chat/completions", json=chat(served, stream=True, **fields))
    assert response.status_code == 200
    *chunks, last = events(response.content)
    assert last["error"].keys() == {"message", "type", "param", "code"}
    assert last["error"]["type"] == type_
    assert "Traceback" not in last["error"]["message"]
    assert chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert all(stream.closed for stream in door.streams)


async def test_a_bug_in_mid_stream_is_an_event_too(served: ServedModel, client_for: ClientFor) -> None:
    door = ScriptedDoor([served], token_ids=[65, None])  # type: ignore[list-item]
    async with client_for(door) as client:
        response = await client.post("/v1/completions", json={"model": served.name, "prompt": "x", "stream": True})
    *chunks, last = events(response.content)
    assert chunks
    assert last["error"]["code"] == "internal_error"


async def test_health_tells_the_reason(served: ServedModel, client_for: ClientFor) -> None:
    door = ScriptedDoor([served], state=Health(healthy=True, ready=False, reason="All queues are full."))
    async with client_for(door) as client:
        assert (await client.get("/health")).json() == {"status": "healthy"}
        response = await client.get("/ready")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "All queues are full."
        door.state = Health(healthy=False, ready=False, reason="The engine is stuck.", details={"engines": 1})
        response = await client.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "The engine is stuck."
        assert response.json()["engines"] == 1


async def test_engines_that_do_not_answer_are_unhealthy(
    served: ServedModel, client_for: ClientFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_HEALTH_TIMEOUT_S", 0.05)
    door = ScriptedDoor([served])
    door.health = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    async with client_for(door) as client:
        assert (await client.get("/health")).status_code == 503
