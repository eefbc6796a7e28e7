"""What is read as a body: by content type, by size, by time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig
from tests.serving.conftest import ClientFor
from tests.serving.replies import refused
from tests.serving.scripted_door import ScriptedDoor

PATH = "/v1/completions"


def body(served: ServedModel) -> bytes:
    return b'{"model": "%s", "prompt": "x", "max_tokens": 2}' % served.name.encode()


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "application/x-www-form-urlencoded", "", "a/b+json", None],
)
async def test_json_is_read_whatever_a_plain_curl_calls_it(
    served: ServedModel, client_for: ClientFor, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with client_for(ScriptedDoor([served], token_ids=[65])) as client:
        response = await client.post(PATH, content=body(served), headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/xml"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_other_types_are_415(served: ServedModel, client_for: ClientFor, headers: dict[str, str]) -> None:
    async with client_for(ScriptedDoor([served])) as client:
        refused(await client.post(PATH, content=body(served), headers=headers), 415)


async def test_a_form_is_a_400_that_says_json(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([served])) as client:
        assert "JSON" in refused(await client.post(PATH, data={"prompt": "x"}))["message"]
        assert "empty" in refused(await client.post(PATH))["message"]


async def test_a_declared_length_over_the_limit_is_refused_unread(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([served]), HttpConfig(max_body_bytes=100)) as client:
        refused(await client.post(PATH, content=b" " * 101), 413)
        assert (await client.post(PATH, content=body(served) + b" " * 20)).status_code != 413


async def test_an_undeclared_length_is_refused_while_it_is_read(served: ServedModel, client_for: ClientFor) -> None:
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield b" " * 50

    async with client_for(ScriptedDoor([served]), HttpConfig(max_body_bytes=100)) as client:
        refused(await client.post(PATH, content=pieces()), 413)
    assert taken < 10


async def test_a_body_that_does_not_come_is_given_up(served: ServedModel, client_for: ClientFor) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with client_for(ScriptedDoor([served]), HttpConfig(body_timeout_s=0.05)) as client:
        refused(await client.post(PATH, content=slow()), 408)


async def test_a_large_body_is_prepared_beside_the_loop(served: ServedModel, client_for: ClientFor) -> None:
    large = b'{"model": "%s", "prompt": "%s", "max_tokens": 2}' % (served.name.encode(), b"x " * 50_000)
    async with client_for(ScriptedDoor([served])) as client:
        assert refused(await client.post(PATH, content=large))["code"] == "context_length_exceeded"
