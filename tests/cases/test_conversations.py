"""Messages as clients send them, templates as checkpoints bring them, thoughts and tool calls as models write them."""

import json
from typing import Any

import pytest

from tests.cases.conftest import Serve
from tests.cases.rig import Rig
from tests.cases.service import NO_THINKING, TEXT, content, finish, message, num_completion_tokens
from tests.serving.replies import joined_chat

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 2, "y": 40}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
ASK = {"role": "user", "content": "sum 2 and 40"}


def tool(name: str, **properties: str) -> dict[str, Any]:
    typed = {key: {"type": kind} for key, kind in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": typed}}}


ADD, PING = tool("add", x="integer", y="integer"), tool("ping")
ROUTE = tool("find_route", **{"from": "string", "stops": "array", "note": "string"})


async def num_prompt_tokens(service: Any, messages: list[Any], **fields: Any) -> int:
    number: int = (await service.chat(messages=messages, max_tokens=1, **fields))["usage"]["prompt_tokens"]
    return number


async def test_missing_content_of_an_assistant_is_empty(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        lengths = set()
        empty: list[dict[str, Any]] = [{"content": None}, {}, {"content": []}, {"content": "", "refusal": None}]
        for assistant in empty:
            turn = {"role": "assistant", "tool_calls": [CALL]} | assistant
            lengths.add(await num_prompt_tokens(service, [ASK, turn, RESULT], tools=[ADD]))
        assert len(lengths) == 1
        thoughtful = {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I add."}
        await num_prompt_tokens(service, [ASK, thoughtful, RESULT], tools=[ADD])


async def test_roles(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        rule, hi = {"content": "Answer in Latin only."}, {"role": "user", "content": "hi"}
        as_developer = await num_prompt_tokens(service, [rule | {"role": "developer"}, hi])
        assert as_developer == await num_prompt_tokens(service, [rule | {"role": "system"}, hi])
        assert as_developer > await num_prompt_tokens(service, [hi])
        later = [hi, {"role": "assistant", "content": "yes", "tool_calls": None}, rule | {"role": "system"}, hi]
        await num_prompt_tokens(service, later)
        await num_prompt_tokens(service, [hi | {"name": "kim", "id": 77}])
        await service.refuses(messages=[{"role": "wizard", "content": "hi"}], param="messages")
        await service.refuses(messages=[{"role": "user", "content": None}], param="messages")
        await service.refuses(messages=[{"role": "user"}], param="messages")


async def test_content_in_parts(rig: Rig, serve: Serve) -> None:
    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text} for text in texts]

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    async with serve(rig.sens()) as service:
        split = [{"role": "system", "content": parts("Be brief.")}, {"role": "user", "content": parts("one. ", "two")}]
        whole = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one. two"}]
        replies = [await service.chat(messages=m, max_tokens=4, temperature=0) for m in (split, whole)]
        assert content(replies[0]) == content(replies[1])
        assert replies[0]["usage"]["prompt_tokens"] == replies[1]["usage"]["prompt_tokens"]
        error = await service.refuses(messages=[{"role": "user", "content": [*parts("look"), image]}])
        assert "text only" in error["message"]
        turns = [ASK, {"role": "assistant", "content": parts("calling"), "tool_calls": [CALL]}]
        listed = await num_prompt_tokens(service, [*turns, RESULT | {"content": parts("pong")}])
        assert listed == await num_prompt_tokens(service, [*turns, RESULT | {"content": "pong"}])
        cached = [{"type": "text", "text": "cached", "cache_control": {"type": "ephemeral"}}]
        await num_prompt_tokens(service, [{"role": "user", "content": cached}])
        await service.refuses(messages=[{"role": "user", "content": [{"type": "text"}]}], param="messages")


async def test_control_tokens_typed_by_a_user_are_text(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        typed = await num_prompt_tokens(service, [{"role": "user", "content": "<|im_end|>"}])
        assert typed > 2 + await num_prompt_tokens(service, [{"role": "user", "content": "x"}])


async def test_templates(rig: Rig, serve: Serve) -> None:
    bare = rig.copy(rig.sens(), "no-template")
    for file in bare.glob("*chat_template*"):
        file.unlink()
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    async with serve(bare) as service:
        assert "chat template" in (await service.refuses(max_tokens=1))["message"]
        await service.text("x", max_tokens=1)
    strict = rig.copy(bare, "strict-template")
    (strict / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if not loop.first %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    async with serve(strict) as service:
        await service.chat(max_tokens=1)
        error = await service.refuses(messages=[ASK, ASK], max_tokens=1)
        assert "roles must alternate" in error["message"]


PLAIN = "Plain answer 42."
THOUGHT = "<think>\nweigh both options\n</think>\n\nPick the second one."


async def test_without_thinking_all_is_content(rig: Rig, serve: Serve) -> None:
    folder, _ = rig.script(PLAIN, thinking=False)
    async with serve(folder) as service:
        reply = await service.same(temperature=0, **NO_THINKING)
        assert content(reply) == PLAIN
        assert "reasoning_content" not in message(reply)


@pytest.mark.parametrize("split", [None, 1, 2])
async def test_thoughts_are_told_apart_at_every_cut(rig: Rig, serve: Serve, split: int | None) -> None:
    folder, ids = rig.script(THOUGHT, split=split)
    async with serve(folder) as service:
        full = await service.same(temperature=0)
        assert message(full)["reasoning_content"].strip() == "weigh both options"
        assert message(full)["reasoning"] == message(full)["reasoning_content"]
        assert content(full).strip() == "Pick the second one."
        for max_tokens in range(1, len(ids) + 1):
            cut = await service.same(temperature=0, max_tokens=max_tokens)
            assert finish(cut) == "length"
            thoughts = message(cut).get("reasoning_content") or ""
            assert message(full)["reasoning_content"].startswith(thoughts)
            assert content(full).startswith(content(cut))
            assert not content(cut) or thoughts == message(full)["reasoning_content"]
            assert "<" not in thoughts + content(cut)


async def test_with_the_split_off_the_tags_stay(rig: Rig, serve: Serve) -> None:
    folder, _ = rig.script(THOUGHT)
    async with serve(folder, reasoning=False) as service:
        assert content(await service.same(temperature=0)) == THOUGHT


ARGUMENTS = '{"from": "Łódź", "stops": [3, {"via": null}], "note": "a}b{c"}'
CALL_TEXT = f'<tool_call>\n{{"name": "find_route", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.mark.parametrize("split", [None, 1, 2, 3])
@pytest.mark.parametrize("min_outputs", [1, 3])
async def test_a_streamed_call_is_the_plain_call(rig: Rig, serve: Serve, split: int | None, min_outputs: int) -> None:
    folder, _ = rig.script(CALL_TEXT, thinking=False, split=split)
    async with serve(folder) as service:
        service.door.min_outputs = min_outputs
        reply = await service.same(temperature=0, tools=[ROUTE], **NO_THINKING)
        (call,) = message(reply)["tool_calls"]
        assert call["function"]["name"] == "find_route"
        assert json.loads(call["function"]["arguments"]) == json.loads(ARGUMENTS)
        assert finish(reply) == "tool_calls"
        assert content(reply) == ""
        silent = await service.same(temperature=0, tools=[ROUTE], tool_choice="none", **NO_THINKING)
        assert "tool_calls" not in message(silent)
        assert finish(silent) == "stop"


async def test_a_call_cut_by_length_is_never_called_complete(rig: Rig, serve: Serve) -> None:
    """vllm#53269: a cut call was reported as `tool_calls`."""
    folder, ids = rig.script(CALL_TEXT, thinking=False, split=1)
    async with serve(folder) as service:
        for max_tokens in range(1, len(ids) + 1):
            reply = await service.same(temperature=0, tools=[ROUTE], max_tokens=max_tokens, **NO_THINKING)
            assert finish(reply) == "length"
        reply = await service.same(temperature=0, tools=[ROUTE], max_tokens=len(ids) + 1, **NO_THINKING)
        assert finish(reply) == "tool_calls"


async def test_a_call_without_arguments(rig: Rig, serve: Serve) -> None:
    folder, _ = rig.script('<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>', thinking=False, split=1)
    async with serve(folder) as service:
        reply = await service.same(temperature=0, tools=[PING], **NO_THINKING)
        assert message(reply)["tool_calls"][0]["function"] == {"name": "ping", "arguments": "{}"}


@pytest.mark.parametrize("min_outputs", [1, 2, 3, 7])
async def test_thoughts_before_a_call(rig: Rig, serve: Serve, min_outputs: int) -> None:
    text = '<think>\nuse the tool\n</think>\n\n<tool_call>{"name": "add", "arguments": {"x": 2, "y": 40}}</tool_call>'
    folder, _ = rig.script(text, split=2)
    async with serve(folder) as service:
        service.door.min_outputs = min_outputs
        reply = await service.same(temperature=0, tools=[ADD])
        assert message(reply)["reasoning_content"].strip() == "use the tool"
        (call,) = message(reply)["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": 2, "y": 40}
        assert (finish(reply), content(reply)) == ("tool_calls", "")


async def test_two_calls_have_indices_and_ids_of_their_own(rig: Rig, serve: Serve) -> None:
    first = '<tool_call>\n{"name":"ping","arguments":{}}\n</tool_call>'
    second = '<tool_call>{ "name" : "add", "arguments" : {"x": 2} }</tool_call>'
    folder, _ = rig.script(f"{first} {second}", thinking=False, split=3)
    async with serve(folder) as service:
        replies = [await service.same(temperature=0, tools=[PING, ADD], **NO_THINKING) for _ in range(2)]
        for reply in replies:
            calls = [call["function"] for call in message(reply)["tool_calls"]]
            assert [call["name"] for call in calls] == ["ping", "add"]
            assert [json.loads(call["arguments"]) for call in calls] == [{}, {"x": 2}]
            assert finish(reply) == "tool_calls"
        ids = [call["id"] for reply in replies for call in message(reply)["tool_calls"]]
        assert len(set(ids)) == 4
        one = await service.same(temperature=0, tools=[PING, ADD], parallel_tool_calls=False, **NO_THINKING)
        assert [call["function"]["name"] for call in message(one)["tool_calls"]] == ["ping"]


async def test_several_choices_each_have_their_words(rig: Rig, serve: Serve) -> None:
    folder, ids = rig.script(THOUGHT, split=1)
    async with serve(folder) as service:
        stream = joined_chat(await service.stream(temperature=0, n=3))
        assert [choice["index"] for choice in stream] == [0, 1, 2]
        assert len({json.dumps(choice["message"]) for choice in stream}) == 1
        reply = await service.chat(temperature=0, n=3)
        assert num_completion_tokens(reply) == 3 * (len(ids) + 1)


async def test_a_script_answers_completions_too(rig: Rig, serve: Serve) -> None:
    folder, _ = rig.script(PLAIN)
    async with serve(folder) as service:
        assert (await service.same(TEXT, prompt="go\n", temperature=0, max_tokens=64))["choices"][0]["text"] == PLAIN
