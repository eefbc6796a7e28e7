"""Fields of a chat that no other test asks for: each is obeyed, accepted without harm, or refused by name."""

from typing import Any

import pytest

from nanoserve.serving.door import ServedModel
from tests.serving.conftest import ClientFor
from tests.serving.replies import events, refused
from tests.serving.scripted_door import ScriptedDoor
from tests.serving.test_messages import door_saying

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
HARMLESS: dict[str, Any] = {
    "store": True, "metadata": {"a": "b"}, "user": {"id": 7}, "service_tier": "auto", "verbosity": "low",
    "prediction": {"type": "content", "content": "Fine, as predicted."}, "prompt_cache_key": "k",
    "safety_identifier": "s", "web_search_options": {},
    "parallel_tool_calls": True, "logit_bias": {}, "stop": None, "seed": None,
    "prompt_cache_retention": "24h", "functions": None, "function_call": None, "max_tokens": None,
}  # fmt: skip


def body(served: ServedModel, **fields: Any) -> dict[str, Any]:
    return {"model": served.name, "messages": HI, "max_completion_tokens": 9} | fields


async def test_harmless_fields_change_nothing(served: ServedModel, client_for: ClientFor) -> None:
    door = door_saying(served, "Fine.")
    async with client_for(door) as client:
        for fields in ({}, HARMLESS, *({name: value} for name, value in HARMLESS.items())):
            reply = (await client.post(CHAT, json=body(served, **fields))).json()
            assert reply["choices"][0]["message"]["content"] == "Fine.", fields
    assert len({request.prompt_token_ids for request in door.opened}) == 1
    assert {request.sampling.max_tokens for request in door.opened} == {9}


async def test_fields_that_reach_the_engine(served: ServedModel, client_for: ClientFor) -> None:
    door = door_saying(served, "Fine.")
    fields = {
        "min_p": 0.1, "top_k": 7, "repetition_penalty": 1.1, "priority": -3, "cache_salt": "tenant", "seed": 5,
        "prompt_logprobs": 2, "stop_token_ids": [65], "ignore_eos": True, "min_tokens": 2, "logit_bias": {"65": -5},
    }  # fmt: skip
    async with client_for(door) as client:
        await client.post(CHAT, json=body(served, **fields), headers={"x-session-id": "s-1"})
    (request,) = door.opened
    sampling = request.sampling
    assert (sampling.min_p, sampling.top_k, sampling.repetition_penalty, sampling.seed) == (0.1, 7, 1.1, 5)
    assert (sampling.prompt_logprobs, sampling.min_tokens, sampling.logit_bias) == (2, 2, {65: -5})
    assert tuple(sampling.stop_token_ids or ()) == (65,)
    assert (request.priority, request.cache_salt, request.session_id) == (-3, "tenant", "s-1")


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned_on_demand(served: ServedModel, client_for: ClientFor, stream: bool) -> None:
    door = door_saying(served, "Fine.")
    async with client_for(door) as client:
        reply = await client.post(CHAT, json=body(served, return_token_ids=True, stream=stream))
    (prompt,) = {request.prompt_token_ids for request in door.opened}
    if stream:
        chunks = events(reply.content)[:-1]
        told = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
        assert chunks[0]["prompt_token_ids"] == list(prompt)
    else:
        told = reply.json()["choices"][0]["token_ids"]
        assert reply.json()["prompt_token_ids"] == list(prompt)
    assert told == list(door.token_ids)


async def test_the_final_message_is_continued(served: ServedModel, client_for: ClientFor) -> None:
    door = door_saying(served, " four")
    half = [*HI, {"role": "assistant", "content": "Two and two is"}]
    async with client_for(door) as client:
        fields = {"messages": half, "continue_final_message": True, "add_generation_prompt": False}
        assert (await client.post(CHAT, json=body(served, **fields))).status_code == 200
        refused(await client.post(CHAT, json=body(served, **fields | {"add_generation_prompt": True})), 400)
        await client.post(CHAT, json=body(served, add_generation_prompt=False))
    first, bare = (served.tokenizer.decode(r.prompt_token_ids, skip_special_tokens=False) for r in door.opened)
    assert first.endswith("assistant\nTwo and two is")
    assert bare.endswith("hi<|im_end|>\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "[" * 100_000}}, "structured_outputs"),
        ({"structured_outputs": {"json": '{"a":' * 9000 + "1" + "}" * 9000}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(" * 5000 + "a" + ")" * 5000}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}}, "structured_outputs"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    served: ServedModel, client_for: ClientFor, fields: dict[str, Any], param: str
) -> None:
    async with client_for(ScriptedDoor([served])) as client:
        refused(await client.post(CHAT, json=body(served, **fields)), 400, param)
