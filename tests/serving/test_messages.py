"""`/v1/messages` as the `anthropic` client sees it, on a real socket, and its events as they come over the wire."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest

from nanoserve.core.outputs import FinishReason
from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from tests.serving.conftest import ClientFor
from tests.serving.loopback import listening
from tests.serving.replies import refused
from tests.serving.scripted_door import ScriptedDoor

MODEL = "team/qwen-like"
HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": [40]}}\n</tool_call>'
TEXT = f"<think>\nsum them\n</think>\n\nLet me add. {CALL}\nDone, then. {CALL}"
ADD: dict[str, Any] = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": HI}
THINKING: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 100}}


def door_saying(served: ServedModel, text: str = TEXT, **fields: Any) -> ScriptedDoor:
    return ScriptedDoor([served], served.tokenizer.encode(text, allow_special=True), **fields)


@asynccontextmanager
async def client_on(door: ScriptedDoor, config: HttpConfig | None = None) -> AsyncIterator[Any]:
    async with (
        listening(build_app(door, config or HttpConfig())) as port,
        anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="k", max_retries=0) as client,
    ):
        yield client


def blocks_of(message: Any) -> list[tuple[Any, ...]]:
    told: dict[str, Any] = {
        "thinking": lambda block: (block.thinking, bool(block.signature)),
        "text": lambda block: (block.text,),
        "tool_use": lambda block: (block.name, block.input),
    }
    return [(block.type, *told[block.type](block)) for block in message.content]


def named_events(body: bytes) -> list[dict[str, Any]]:
    """The payloads of a stream whose events have names, which must be their types."""
    found = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        found.append(payload)
    return found


async def test_thoughts_texts_and_calls_are_blocks_in_the_order_they_were_written(served: ServedModel) -> None:
    async with client_on(door_saying(served)) as client:
        plain = await client.messages.create(**ASKED, **THINKING, tools=[ADD])
        assert blocks_of(plain) == [
            ("thinking", "sum them", True),
            ("text", "Let me add."),
            ("tool_use", "add", {"x": 2, "y": [40]}),
            ("text", "\nDone, then."),
            ("tool_use", "add", {"x": 2, "y": [40]}),
        ]
        assert (plain.role, plain.stop_reason, plain.stop_sequence) == ("assistant", "tool_use", None)
        assert plain.usage.output_tokens > 50
        assert plain.usage.cache_read_input_tokens == 0
        async with client.messages.stream(**ASKED, **THINKING, tools=[ADD]) as stream:
            streamed = await stream.get_final_message()
    assert blocks_of(streamed) == blocks_of(plain)
    assert streamed.stop_reason == plain.stop_reason
    assert streamed.usage.output_tokens == plain.usage.output_tokens
    assert streamed.usage.input_tokens == plain.usage.input_tokens


async def test_the_events_come_in_the_documented_order(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(door_saying(served)) as client:
        reply = await client.post("/v1/messages", json=ASKED | THINKING | {"tools": [ADD], "stream": True})
    events = named_events(reply.content)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    open_index = -1
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            open_index += 1
        assert event["index"] == open_index
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 5
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]


async def test_thoughts_come_only_where_they_were_asked_for(served: ServedModel) -> None:
    door = door_saying(served, "Fine.")
    async with client_on(door) as client:
        for fields in ({}, {"thinking": {"type": "disabled"}}):
            assert blocks_of(await client.messages.create(**ASKED, **fields)) == [("text", "Fine.")]
            assert served.tokenizer.decode(door.opened[-1].prompt_token_ids).endswith("</think>\n\n")
            assert door.opened[-1].thinking is None
        await client.messages.create(**ASKED, **THINKING)
    assert not served.tokenizer.decode(door.opened[-1].prompt_token_ids).endswith("</think>\n\n")
    assert door.opened[-1].thinking is not None
    assert door.opened[-1].thinking.num_tokens == 100


@pytest.mark.parametrize(
    ("fields", "finish", "expected"),
    [
        ({}, FinishReason.STOP, ("end_turn", None)),
        ({}, FinishReason.LENGTH, ("max_tokens", None)),
        ({"stop_sequences": ["ne"]}, FinishReason.STOP, ("stop_sequence", "ne")),
    ],
)
async def test_stop_reasons(served: ServedModel, fields: Any, finish: FinishReason, expected: Any) -> None:
    async with client_on(door_saying(served, "Fine.", finish=finish)) as client:
        plain = await client.messages.create(**ASKED, **fields)
        async with client.messages.stream(**ASKED, **fields) as stream:
            streamed = await stream.get_final_message()
    for message in (plain, streamed):
        assert (message.stop_reason, message.stop_sequence) == expected


async def test_a_round_trip_of_a_tool_reaches_the_template(served: ServedModel) -> None:
    door = door_saying(served, "42")
    history = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "old thought", "signature": "s"},
                {"type": "text", "text": "Adding."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "forty-two"}]},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    async with client_on(door) as client:
        system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
        fields = {"model": MODEL, "messages": history, "system": system, "tools": [ADD]}
        reply = await client.messages.create(max_tokens=9, **fields)
        counted = await client.messages.count_tokens(**fields)
    prompt = served.tokenizer.decode(door.opened[0].prompt_token_ids)
    for text in ("Be short.", '"x": "é"', "<tool_response>forty-two</tool_response>", "user\nWell?", '"name": "add"'):
        assert text in prompt
    assert counted.input_tokens == len(door.opened[0].prompt_token_ids)
    assert reply.usage.input_tokens == counted.input_tokens


async def test_a_last_message_of_the_assistant_is_continued(served: ServedModel) -> None:
    door = door_saying(served, " 42")
    async with client_on(door) as client:
        await client.messages.create(**ASKED | {"messages": [*HI, {"role": "assistant", "content": "It is"}]})
    assert served.tokenizer.decode(door.opened[0].prompt_token_ids).endswith("assistant\nIt is")


@pytest.mark.parametrize(
    ("choice", "forced"),
    [("auto", False), ("any", True), ("tool", True), ("none", False)],
)
async def test_tool_choice(served: ServedModel, choice: str, forced: bool) -> None:
    door = door_saying(served, CALL)
    tool_choice: dict[str, Any] = {"type": choice} | ({"name": "add"} if choice == "tool" else {})
    async with client_on(door) as client:
        reply = await client.messages.create(**ASKED, tools=[ADD], tool_choice=tool_choice)
    assert (door.opened[0].grammar is not None) == forced
    assert reply.content[0].type == ("text" if choice == "none" else "tool_use")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 7}]}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": {}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "add"}]}, "tools"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "sure"}}, "thinking"),
        ({"temperature": 3.0}, "temperature"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
    ],
)
async def test_mistakes_are_told_in_a_shape_that_both_kinds_of_clients_read(
    served: ServedModel, client_for: ClientFor, fields: dict[str, Any], param: str
) -> None:
    async with client_for(door_saying(served)) as client:
        for stream in (False, True):
            reply = await client.post("/v1/messages", json=ASKED | fields | {"stream": stream})
            assert refused(reply, 400, param)["type"] == "invalid_request_error"
            assert reply.json()["type"] == "error"


async def test_the_client_raises_its_own_errors(served: ServedModel) -> None:
    async with client_on(door_saying(served), HttpConfig(api_keys=("other",))) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**ASKED)
    async with client_on(door_saying(served), HttpConfig(api_keys=("k", "other"))) as client:
        assert (await client.messages.create(**ASKED)).content
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**ASKED | {"model": "none"})
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(**ASKED | {"max_tokens": -1})


async def test_a_fault_in_mid_stream_is_an_error_event(served: ServedModel, client_for: ClientFor) -> None:
    door = door_saying(served, "Fine.", finish=FinishReason.ERROR, error=("server_error", "The engine broke."))
    async with client_for(door) as client:
        reply = await client.post("/v1/messages", json=ASKED | {"stream": True})
        assert named_events(reply.content)[-1]["error"]["message"] == "The engine broke."
    async with client_on(door) as anthropic_client:
        with pytest.raises(anthropic.APIError, match="The engine broke"):
            async with anthropic_client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()


async def test_silence_is_filled_with_pings(served: ServedModel) -> None:
    app = build_app(ScriptedDoor([served], finish=None), HttpConfig(ping_s=0.05))
    async with (
        listening(app) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        client.stream("POST", "/v1/messages", json=ASKED | {"stream": True}) as reply,
    ):
        lines = reply.aiter_lines()
        assert [await anext(lines), await anext(lines)] == ["event: ping", 'data: {"type":"ping"}']
