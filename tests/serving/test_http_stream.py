"""How an answer is written: chunks in order, usage where it was asked for, and the same words as the plain reply."""

import asyncio
from typing import Any

import pytest

from nanoserve.core.outputs import FinishReason
from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig
from tests.serving.conftest import ClientFor
from tests.serving.replies import events, joined_chat, joined_text, plain_chat, plain_text
from tests.serving.scripted_door import ScriptedDoor

TEXT = "Zürich 日本語 \U0001f9f5 café"


def door_saying(served: ServedModel, text: str = TEXT) -> ScriptedDoor:
    """A door that says a text byte by byte, so that most tokens are no characters of their own, and then EOS."""
    table = served.tokenizer.byte_table(skip_special_tokens=False)
    of_byte = {table[token_id]: token_id for token_id in reversed(range(256))}
    ids = [of_byte[bytes([byte])] for byte in text.encode()]
    return ScriptedDoor([served], token_ids=ids, stop_token_id=served.tokenizer.eos_token_id)


def chat(served: ServedModel, **fields: Any) -> dict[str, Any]:
    return {"model": served.name, "messages": [{"role": "user", "content": "say it"}], "max_tokens": 64} | fields


async def test_a_stream_is_role_words_reason_done(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(door_saying(served)) as client:
        response = await client.post("/v1/chat/completions", json=chat(served, stream=True))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response.content)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    words = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1]]
    assert "".join(words) == TEXT
    assert not any("\ufffd" in word for word in words)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": False},
    {"stop": ["日"]},
    {"stop": "語", "include_stop_str_in_output": True},
    {"max_tokens": 64, "seed": 7, "temperature": 1},
]


@pytest.mark.parametrize("fields", VARIANTS)
async def test_the_joined_stream_is_the_plain_reply(
    served: ServedModel, client_for: ClientFor, fields: dict[str, Any]
) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    async with client_for(door_saying(served)) as client:
        plain = (await client.post("/v1/chat/completions", json=chat(served, **fields))).json()
        stream = events((await client.post("/v1/chat/completions", json=chat(served, **fields, **usage))).content)
    assert joined_chat(stream) == plain_chat(plain)
    assert stream[-2]["usage"] == plain["usage"]
    assert [choice["index"] for choice in plain["choices"]] == list(range(fields.get("n", 1)))


async def test_choices_are_interleaved(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(door_saying(served)) as client:
        response = await client.post("/v1/chat/completions", json=chat(served, stream=True, n=2))
    order = [chunk["choices"][0]["index"] for chunk in events(response.content)[:-1]]
    assert order != sorted(order)


async def test_usage_comes_once_at_the_end_and_null_before(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(door_saying(served)) as client:
        body = chat(served, stream=True, stream_options={"include_usage": True})
        *chunks, last, done = events((await client.post("/v1/chat/completions", json=body)).content)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(TEXT.encode()) + 1
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


async def test_continuous_usage_never_falls(served: ServedModel, client_for: ClientFor) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client_for(door_saying(served)) as client:
        body = chat(served, stream=True, stream_options=options, n=2)
        *chunks, _ = events((await client.post("/v1/chat/completions", json=body)).content)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * (len(TEXT.encode()) + 1)


async def test_several_prompts_are_numbered_in_order_and_counted_once(
    served: ServedModel, client_for: ClientFor
) -> None:
    body = {"model": served.name, "prompt": ["one", [65, 66], "two two"][:1], "max_tokens": 64, "n": 2}
    body["prompt"] = ["alpha", "beta gamma"]
    async with client_for(door_saying(served, "x y")) as client:
        plain = (await client.post("/v1/completions", json=body)).json()
        one = (await client.post("/v1/completions", json=body | {"prompt": "alpha", "n": 1})).json()
        two = (await client.post("/v1/completions", json=body | {"prompt": "beta gamma", "n": 1})).json()
        stream = events((await client.post("/v1/completions", json=body | {"stream": True})).content)
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
    assert plain["object"] == "text_completion"
    assert plain["id"].startswith("cmpl-")
    assert plain["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"] + two["usage"]["prompt_tokens"]
    assert joined_text(stream) == plain_text(plain)


async def test_echo_puts_the_prompt_first_and_once(served: ServedModel, client_for: ClientFor) -> None:
    body = {"model": served.name, "prompt": "Say it:", "max_tokens": 64, "echo": True}
    async with client_for(door_saying(served)) as client:
        plain = (await client.post("/v1/completions", json=body)).json()
        stream = events((await client.post("/v1/completions", json=body | {"stream": True})).content)
    assert plain["choices"][0]["text"] == "Say it:" + TEXT
    assert joined_text(stream) == plain_text(plain)


async def test_the_seed_used_is_told(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(door_saying(served, "x")) as client:
        given = (await client.post("/v1/chat/completions", json=chat(served, seed=7))).json()["choices"][0]["seed"]
        made = (await client.post("/v1/chat/completions", json=chat(served))).json()["choices"][0]["seed"]
        again = (await client.post("/v1/chat/completions", json=chat(served, seed=made))).json()["choices"][0]["seed"]
    assert given == 7
    assert isinstance(made, int)
    assert again == made


async def test_every_stream_is_closed_when_its_answer_ends(served: ServedModel, client_for: ClientFor) -> None:
    door = door_saying(served)
    async with client_for(door) as client:
        for stream in (True, False):
            await client.post("/v1/chat/completions", json=chat(served, n=3, stream=stream))
    assert len(door.streams) == 6
    assert all(stream.closed for stream in door.streams)


async def test_a_stop_string_ends_the_request_before_the_engine_does(
    served: ServedModel, client_for: ClientFor
) -> None:
    door = door_saying(served)
    async with client_for(door) as client:
        reply = (await client.post("/v1/chat/completions", json=chat(served, stop="ich"))).json()
    assert reply["choices"][0]["message"]["content"] == "Zür"
    assert reply["choices"][0]["stop_reason"] == "ich"
    assert door.streams[0].closed
    assert door.streams[0].num_given < len(door.token_ids)


async def test_silence_is_filled_with_comments(served: ServedModel, client_for: ClientFor) -> None:
    """The fake client cannot leave, so the answer runs into the test's own deadline."""
    door = ScriptedDoor([served], token_ids=[65], finish=None)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    from nanoserve.serving.answer import EventAnswer, EventWriter

    async def produce(writer: EventWriter) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await EventAnswer(produce, idle_s=0.05)({}, receive, send)
    assert sent[0] == b""
    assert 3 <= len(sent) - 1 <= 10
    assert set(sent[1:]) == {b": ping\n\n"}
    assert not door.opened


async def test_an_answer_cut_by_length_says_so(served: ServedModel, client_for: ClientFor) -> None:
    door = ScriptedDoor([served], token_ids=[65, 66], finish=FinishReason.LENGTH)
    async with client_for(door, HttpConfig()) as client:
        reply = (await client.post("/v1/chat/completions", json=chat(served))).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["system_fingerprint"].startswith("nanoserve-")
