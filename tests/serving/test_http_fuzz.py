"""Whatever is posted, the answer is a success or a refusal in the envelope: never a 500, never a hang."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from nanoserve.serving.door import ServedModel
from tests.serving.conftest import ClientFor
from tests.serving.replies import events, refused, strict_json
from tests.serving.scripted_door import ScriptedDoor
from tests.serving.test_messages import named_events

SEEDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "42"},
        ],
        "max_tokens": 3, "n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "stop": ["x"],
        "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "stream": True,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False},
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "tool_choice": "auto", "response_format": {"type": "text"}, "return_token_ids": True, "user": "u",
    },
    "/v1/completions": {
        "prompt": ["hello", "again"], "max_tokens": 3, "n": 1, "echo": True, "logprobs": 1, "stop_token_ids": [7],
        "min_tokens": 0, "prompt_logprobs": 1, "ignore_eos": True, "suffix": None, "best_of": 1, "stream": False,
    },
    "/v1/messages": {
        "max_tokens": 3, "system": [{"type": "text", "text": "x"}], "stream": True, "stop_sequences": ["x"],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "t", "name": "add", "input": {"x": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "go on"}]},
        ],
        "tools": [{"name": "add", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 9},
        "metadata": {"user_id": "u"}, "output_config": {"effort": "low"}, "temperature": 0.5, "top_k": 3,
    },
    "/v1/responses": {
        "instructions": "x", "max_output_tokens": 3, "stream": True, "store": True, "truncation": "auto",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "42"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}, "metadata": {"a": "b"},
        "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
    },
    "/tokenize": {"prompt": "hello", "return_token_strs": True, "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3], "skip_special_tokens": False},
}  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3.5, 1e308, 2**31, 2**63, 2**64, -(2**70), "", "x", "\x00", "\ufdd0", "\U0001f9f5" * 9,
    "<|im_end|>", "<tool_call>", [], {}, [[]], [None], [1], ["a"], [[1], "a"], {"a": {"b": []}}, [{}], {"type": "x"},
    "a" * 5000, [0] * 300, {"$ref": "#"}, "{{ 7 * 7 }}", "{% raise %}",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all members of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in [(*path, key), *places(item, (*path, key))]]


def mutated(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy with one or two members replaced, removed or doubled."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 2))):
        *path, last = rng.choice(places(body))
        parent: Any = body
        for key in path:
            parent = parent[key]
        match rng.randrange(4):
            case 0:
                del parent[last]
            case 1:
                parent[last] = [parent[last], parent[last]]
            case _:
                parent[last] = rng.choice(ODD)
    return body


async def check(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        refused(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        if response.content.startswith(b"event: "):
            assert named_events(response.content)[-1]["type"] in ("message_stop", "response.completed")
        else:
            assert events(response.content)[-1] == "[DONE]"
    else:
        strict_json(response.content)


@pytest.mark.parametrize("path", SEEDS)
async def test_mutated_bodies(served: ServedModel, client_for: ClientFor, path: str) -> None:
    rng = random.Random(path)
    door = ScriptedDoor([served], token_ids=[65, 66], stop_token_id=served.tokenizer.eos_token_id)
    async with client_for(door) as client:
        for _ in range(250):
            body = mutated(SEEDS[path] | {"model": served.name}, rng)
            async with asyncio.timeout(5):
                response = await client.post(path, content=json.dumps(body))
            try:
                await check(response)
            except AssertionError as error:
                raise AssertionError(f"{path} {json.dumps(body)[:2000]}: {error}") from error
    assert all(stream.closed for stream in door.streams)


@pytest.mark.parametrize("path", SEEDS)
async def test_mutated_bytes(served: ServedModel, client_for: ClientFor, path: str) -> None:
    rng = random.Random(path)
    raw = json.dumps(SEEDS[path] | {"model": served.name}).encode()
    async with client_for(ScriptedDoor([served], token_ids=[65])) as client:
        for _ in range(250):
            broken = bytearray(raw)
            for _ in range(rng.randint(1, 4)):
                start = rng.randrange(len(broken))
                broken[start : start + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
            await check(await client.post(path, content=bytes(broken)))


@pytest.mark.parametrize("path", SEEDS)
async def test_bodies_made_to_be_slow_are_answered_soon(served: ServedModel, client_for: ClientFor, path: str) -> None:
    """Two megabytes of wrong items: pydantic would list each of them."""
    many = [json.dumps(["x"] * 200_000), json.dumps([[1.5]] * 200_000), json.dumps([{}] * 200_000), "[" * 500_000]
    async with client_for(ScriptedDoor([served])) as client:
        lists = {"prompt", "tokens", "messages", "tools", "stop", "stop_token_ids", "n", "input"}
        for field in SEEDS[path].keys() & lists:
            head = json.dumps({key: item for key, item in SEEDS[path].items() if key != field})[:-1]
            for value in many:
                async with asyncio.timeout(10):
                    body = f'{head}, "model": "{served.name}", "{field}": {value}}}'
                    await check(await client.post(path, content=body))
