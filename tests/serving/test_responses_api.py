"""`/v1/responses` as the `openai` client sees it, on a real socket, and its events as they come over the wire."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import orjson
import pytest
from pydantic import BaseModel

from nanoserve.core.outputs import FinishReason
from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.serving.response_store import ResponseStore, StoredResponse
from tests.serving.conftest import ClientFor
from tests.serving.loopback import listening
from tests.serving.replies import refused
from tests.serving.scripted_door import ScriptedDoor
from tests.serving.test_messages import CALL, TEXT, door_saying, named_events

MODEL = "team/qwen-like"
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
ASKED: dict[str, Any] = {"model": MODEL, "input": "hi"}
ARGUMENTS = '{"x": 2, "y": [40]}'


class Sum(BaseModel):
    total: int


@asynccontextmanager
async def client_on(door: ScriptedDoor, config: HttpConfig | None = None) -> AsyncIterator[Any]:
    async with (
        listening(build_app(door, config or HttpConfig())) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


def items_of(response: Any) -> list[tuple[Any, ...]]:
    told: dict[str, Any] = {
        "reasoning": lambda item: [part.text for part in item.content],
        "message": lambda item: [part.text for part in item.content],
        "function_call": lambda item: [item.name, item.arguments],
    }
    return [(item.type, item.status, *told[item.type](item)) for item in response.output]


async def test_thoughts_texts_and_calls_are_items_in_the_order_they_were_written(served: ServedModel) -> None:
    async with client_on(door_saying(served)) as client:
        plain = await client.responses.create(**ASKED, tools=[ADD], include=["reasoning.encrypted_content"])
        assert items_of(plain) == [
            ("reasoning", "completed", "sum them"),
            ("message", "completed", "Let me add."),
            ("function_call", "completed", "add", ARGUMENTS),
            ("message", "completed", "\nDone, then."),
            ("function_call", "completed", "add", ARGUMENTS),
        ]
        assert plain.output[0].encrypted_content
        assert plain.status == "completed"
        assert plain.usage.output_tokens_details.reasoning_tokens > 2
        assert plain.usage.total_tokens == plain.usage.input_tokens + plain.usage.output_tokens
        async with client.responses.stream(**ASKED, tools=[ADD]) as stream:
            streamed = await stream.get_final_response()
    assert items_of(streamed) == items_of(plain)
    assert streamed.usage == plain.usage


async def test_the_events_come_in_the_documented_order(served: ServedModel, client_for: ClientFor) -> None:
    text = f"<think>\nsum\n</think>\n\nLet me. {CALL}"
    async with client_for(door_saying(served, text)) as client:
        reply = await client.post("/v1/responses", json=ASKED | {"tools": [ADD], "stream": True})
    events = named_events(reply.content)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in events))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done",
        "function_call_arguments.delta", "function_call_arguments.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["output"] == []
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        deltas = "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
        (whole,) = [event for event in events if event["type"] == f"response.{kind}.done"]
        assert whole.get("text", whole.get("arguments")) == deltas


async def test_an_answer_is_parsed_into_a_model(served: ServedModel) -> None:
    door = door_saying(served, '{"total": 42}')
    async with client_on(door) as client:
        response = await client.responses.parse(**ASKED, text_format=Sum, reasoning={"effort": "none"})
        assert response.output_parsed == Sum(total=42)
        async with client.responses.stream(**ASKED, text_format=Sum, reasoning={"effort": "none"}) as stream:
            assert (await stream.get_final_response()).output_parsed == Sum(total=42)
    assert all(request.grammar is not None for request in door.opened)


async def test_a_cut_answer_is_incomplete(served: ServedModel) -> None:
    async with client_on(door_saying(served, "Fine, bu", finish=FinishReason.LENGTH)) as client:
        plain = await client.responses.create(**ASKED, max_output_tokens=3)
        stream = await client.responses.create(**ASKED, max_output_tokens=3, stream=True)
        last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    for response in (plain, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert items_of(response) == [("message", "incomplete", "Fine, bu")]


async def test_input_items_reach_the_template(served: ServedModel) -> None:
    door = door_saying(served, "42")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "sum "}, {"type": "input_text", "text": "them"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I add"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Adding."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": "é"}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "forty"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "developer", "content": "Be brief."},
    ]
    async with client_on(door) as client:
        await client.responses.create(model=MODEL, input=items, instructions="Be kind.", tools=[ADD])
    prompt = served.tokenizer.decode(door.opened[0].prompt_token_ids, skip_special_tokens=False)
    turns = [turn.removesuffix("<|im_end|>\n") for turn in prompt.split("<|im_start|>")[1:]]
    assert turns[0].startswith("systemBe kind.")
    assert turns[1] == "user\nsum them"
    assert turns[2].count("<tool_call>") == 2
    assert "Adding.<tool_call>" in turns[2]
    assert '"x": "é"' in turns[2]
    assert ["<tool_response>" in turn for turn in turns[3:5]] == [True, True]
    assert "Be brief." in turns[5]


async def test_thoughts_come_back_from_what_a_client_kept(served: ServedModel) -> None:
    """Templates show the thoughts of the last turn only; so the last item is the assistant's here."""
    door = door_saying(served, "<think>\nsum them\n</think>\n\nFine.")
    async with client_on(door) as client:
        first = await client.responses.create(**ASKED, include=["reasoning.encrypted_content"], store=False)
        kept = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": first.output[0].encrypted_content}
        for item in (kept, first.output[0].to_dict()):
            words = {"role": "assistant", "content": "Fine."}
            await client.responses.create(model=MODEL, input=[{"role": "user", "content": "hi"}, item, words])
            assert "<think>\nsum them\n</think>" in served.tokenizer.decode(door.opened[-1].prompt_token_ids)


async def test_a_conversation_is_continued_by_id(served: ServedModel) -> None:
    door = door_saying(served, TEXT)
    async with client_on(door) as client:
        first = await client.responses.create(**ASKED, tools=[ADD], instructions="Only now.")
        call_id = first.output[2].call_id
        results = [{"type": "function_call_output", "call_id": call_id, "output": "42"}]
        stream = await client.responses.create(
            model=MODEL, input=results, previous_response_id=first.id, tools=[ADD], stream=True
        )
        second = [event async for event in stream][-1].response
        await client.responses.create(model=MODEL, input="and?", previous_response_id=second.id)
        whole = served.tokenizer.decode(door.opened[-1].prompt_token_ids)
        again = await client.responses.retrieve(first.id)
        assert again.to_dict() == first.to_dict()
        await client.responses.delete(first.id)
        for gone in (client.responses.retrieve(first.id), client.responses.delete(first.id)):
            with pytest.raises(openai.NotFoundError, match="stored"):
                await gone
    assert whole.count("Let me add.") == 2
    assert whole.count("<tool_response>42</tool_response>") == 1
    assert "Only now." not in whole
    assert whole.count("user\nhi") == 1


async def test_what_is_not_stored_is_not_found(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(door_saying(served, "Fine.")) as client:
        first = (await client.post("/v1/responses", json=ASKED | {"store": False})).json()
        refused(await client.get(f"/v1/responses/{first['id']}"), 404)
        for response_id in (first["id"], "resp_none"):
            reply = await client.post("/v1/responses", json=ASKED | {"previous_response_id": response_id})
            assert refused(reply, 404, "previous_response_id")["code"] == "previous_response_not_found"


def kept(num_bytes: int) -> StoredResponse:
    return StoredResponse.of(b"x" * (num_bytes - 2), [], [], [])


def test_the_store_is_bounded_by_count_and_bytes() -> None:
    store = ResponseStore(max_count=3, max_bytes=100)
    for number in range(4):
        store.put(f"r{number}", kept(20))
        store.get("r0")
    assert [store.get(f"r{number}") is not None for number in range(4)] == [True, False, True, True]
    store.put("large", kept(60))
    assert len(store) == 2  # 62 + 22 bytes
    store.put("too large", kept(99))
    assert len(store) == 0
    store.put("r", kept(90))
    assert store.pop("r") is not None
    assert store.pop("r") is None


async def test_items_are_listed_and_may_be_referred_to(served: ServedModel, client_for: ClientFor) -> None:
    door = door_saying(served, "Fine.")
    async with client_on(door) as client:
        items = [{"role": "user", "content": f"turn {number}"} for number in range(3)]
        first = await client.responses.create(model=MODEL, input=items)
        listed = [item async for item in client.responses.input_items.list(first.id, order="asc", limit=2)]
        assert [item.content[0].text for item in listed] == ["turn 0", "turn 1", "turn 2"]
        newest = await client.responses.input_items.list(first.id, limit=1)
        assert (newest.data[0].id, newest.has_more) == (listed[2].id, True)
        referring = [
            {"type": "item_reference", "id": listed[1].id},
            {"id": first.output[0].id},
            {"role": "user", "content": "and?"},
        ]
        second = await client.responses.create(model=MODEL, input=referring)
        prompt = served.tokenizer.decode(door.opened[-1].prompt_token_ids)
        assert [word in prompt for word in ("turn 0", "turn 1", "Fine.", "and?")] == [False, True, True, True]
        assert len((await client.responses.input_items.list(second.id)).data) == 3
        await client.responses.delete(first.id)
        await client.responses.create(model=MODEL, input=referring[:1])  # the second response holds it too
        await client.responses.delete(second.id)
    async with client_for(door) as plain:
        gone = await plain.post("/v1/responses", json=ASKED | {"input": referring})
        assert refused(gone, 404, "input")["code"] == "item_not_found"
        third = (await plain.post("/v1/responses", json=ASKED)).json()["id"]
        refused(await plain.get(f"/v1/responses/{third}?stream=true"), 400, "stream")
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
            refused(await plain.get(f"/v1/responses/{third}/input_items?{query}"), 400, param)
        refused(await plain.get("/v1/responses/none/input_items"), 404)


async def test_truncation_drops_the_oldest_messages_when_asked_to(served: ServedModel, client_for: ClientFor) -> None:
    """256 tokens of context; twenty turns of some twenty tokens."""
    door = door_saying(served, "Fine.")
    items = [{"role": "user", "content": f"turn number {index} is a few words long"} for index in range(20)]
    body = {"model": MODEL, "input": items, "instructions": "Be brief."}
    async with client_for(door) as client:
        refused(await client.post("/v1/responses", json=body), 400, "input")
        reply = await client.post("/v1/responses", json=body | {"truncation": "auto"})
    assert reply.status_code == 200
    prompt = served.tokenizer.decode(door.opened[0].prompt_token_ids)
    assert "Be brief." in prompt
    assert "turn number 19 " in prompt
    assert "turn number 0 " not in prompt
    assert len(door.opened[0].prompt_token_ids) > 200


async def test_logprobs_are_of_the_text_alone(served: ServedModel, client_for: ClientFor) -> None:
    fields = {"include": ["message.output_text.logprobs"]}
    async with client_for(door_saying(served, "<think>\nsum\n</think>\n\nFine.")) as client:
        plain = (await client.post("/v1/responses", json=ASKED | fields)).json()
        stream = await client.post("/v1/responses", json=ASKED | fields | {"stream": True})
    (part,) = plain["output"][1]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]).strip() == "Fine."
    (streamed,) = named_events(stream.content)[-1]["response"]["output"][1]["content"]
    assert streamed == part


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "add", "arguments": "[1"}]}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "some"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "none"}, "tools": [ADD]}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "heroic"}}, "reasoning"),
        ({"top_logprobs": 99}, "top_logprobs"),
    ],
)
async def test_mistakes_are_told_by_the_names_of_this_route(
    served: ServedModel, client_for: ClientFor, fields: dict[str, Any], param: str
) -> None:
    async with client_for(door_saying(served)) as client:
        for stream in (False, True):
            reply = await client.post("/v1/responses", json=ASKED | fields | {"stream": stream})
            refused(reply, 400, param)


async def test_only_allowed_tools_are_offered(served: ServedModel) -> None:
    door = door_saying(served, CALL)
    tools = [ADD, ADD | {"name": "subtract"}]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    async with client_on(door) as client:
        response = await client.responses.create(**ASKED, tools=tools, tool_choice=choice)
    assert items_of(response)[0][:3] == ("function_call", "completed", "add")
    assert "subtract" not in served.tokenizer.decode(door.opened[0].prompt_token_ids)
    assert door.opened[0].grammar is not None


async def test_a_fault_in_mid_stream_is_told_twice_and_raises(served: ServedModel, client_for: ClientFor) -> None:
    door = door_saying(served, "Fine.", finish=FinishReason.ERROR, error=("server_error", "The engine broke."))
    async with client_for(door) as http:
        events = named_events((await http.post("/v1/responses", json=ASKED | {"stream": True})).content)
        assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
        assert events[-2]["response"]["error"]["message"] == events[-1]["message"] == "The engine broke."
        assert events[-1]["sequence_number"] == len(events) - 1
    async with client_on(door) as client:
        with pytest.raises(openai.APIError, match="The engine broke"):
            async for _ in await client.responses.create(**ASKED, stream=True):
                pass


async def test_the_reply_is_what_the_request_settled(served: ServedModel, client_for: ClientFor) -> None:
    fields = {"metadata": {"job": "7"}, "temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": False, "user": "u"}
    async with client_for(door_saying(served, "Fine.")) as client:
        reply = orjson.loads((await client.post("/v1/responses", json=ASKED | fields)).content)
    assert {name: reply[name] for name in fields} == fields
    assert reply["text"]["format"] == {"type": "text"}
    assert reply["error"] is None
