"""A client that leaves takes its requests with it, at once, whatever they were doing; what old clients send works."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from nanoserve.core.request import GenerateRequest
from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from tests.serving.loopback import RawClient, listening
from tests.serving.scripted_door import ScriptedDoor, ScriptedStream

PATH = "/v1/chat/completions"


def chat(served: ServedModel, **fields: Any) -> bytes:
    body = {"model": served.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
    return json.dumps(body | fields).encode()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(2):
        while not condition():  # noqa: ASYNC110 (what is waited for is set by code under test)
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 3}, {}, {"n": 3}])
async def test_leaving_closes_every_stream(served: ServedModel, fields: dict[str, Any], reset: bool) -> None:
    door = ScriptedDoor([served], token_ids=[65, 66, 67], finish=None)
    async with listening(build_app(door, HttpConfig())) as port:
        client = await RawClient.connect(port)
        await client.post(PATH, chat(served, **fields))
        if fields.get("stream"):
            await client.reader.readuntil(b'"content":"')
        await eventually(lambda: len(door.streams) == fields.get("n", 1))
        await eventually(lambda: all(stream.num_given == 3 for stream in door.streams))
        assert not any(stream.closed for stream in door.streams)
        await client.leave(reset=reset)
        await eventually(lambda: all(stream.closed for stream in door.streams))


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token_closes_the_stream(served: ServedModel, stream: bool) -> None:
    door = ScriptedDoor([served], finish=None)
    async with listening(build_app(door, HttpConfig())) as port:
        client = await RawClient.connect(port)
        await client.post(PATH, chat(served, stream=stream))
        await eventually(lambda: len(door.streams) == 1)
        await client.leave()
        await eventually(lambda: door.streams[0].closed)


async def test_leaving_while_no_engine_has_accepted_cancels_the_opening(served: ServedModel) -> None:
    door = ScriptedDoor([served])
    trace: list[str] = []

    async def open_for_ever(request: GenerateRequest, model: str) -> ScriptedStream:
        trace.append("opening")
        try:
            await asyncio.Event().wait()
        finally:
            trace.append("cancelled")
        raise AssertionError

    door.open = open_for_ever  # type: ignore[method-assign]
    async with listening(build_app(door, HttpConfig())) as port:
        client = await RawClient.connect(port)
        await client.post(PATH, chat(served, stream=True))
        await eventually(lambda: trace == ["opening"])
        await client.leave()
        await eventually(lambda: trace == ["opening", "cancelled"])


async def test_http_1_0(served: ServedModel) -> None:
    async with listening(build_app(ScriptedDoor([served], token_ids=[65]), HttpConfig())) as port:
        for stream in (False, True):
            client = await RawClient.connect(port)
            await client.post(PATH, chat(served, stream=stream), version="1.0")
            reply = await asyncio.wait_for(client.reader.read(), 2)
            assert b" 200 OK\r\n" in reply
            assert b'"stop"' in reply
            await client.leave()


async def test_expect_100_continue(served: ServedModel) -> None:
    body = chat(served)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    async with listening(build_app(ScriptedDoor([served], token_ids=[65]), HttpConfig())) as port:
        client = await RawClient.connect(port)
        client.writer.write(head.encode())
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(body)
        assert b" 200 OK\r\n" in await client.reader.readuntil(b"\r\n\r\n")
        await client.leave()


async def test_a_body_over_the_limit_is_answered_while_the_client_still_writes(served: ServedModel) -> None:
    async with listening(build_app(ScriptedDoor([served]), HttpConfig(max_body_bytes=1000))) as port:
        client = await RawClient.connect(port)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.writer.write(head.encode() + (b"400\r\n" + b" " * 1024 + b"\r\n") * 2)
        reply = await asyncio.wait_for(client.reader.readuntil(b"}}"), 2)
        assert b" 413 " in reply
        await client.leave(reset=True)
