"""However the ids of an answer are grouped into outputs, the joined reply is the same on every route that parses it."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.protocol.anthropic import MessagesRequest
from nanoserve.protocol.openai import ChatCompletionRequest
from nanoserve.protocol.openai_responses import ResponsesRequest
from nanoserve.serving import responses_route
from nanoserve.serving.door import ServedModel
from nanoserve.serving.messages_route import _block as message_block
from nanoserve.serving.parts import Parts
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.from_messages import chat_of
from nanoserve.text.postprocess import ChoiceProcessor, Delta
from nanoserve.text.preprocess import ModelLimits, PreparedRequest, Preprocessor
from nanoserve.text.tokenizer import Tokenizer
from tests.serving.scripted_door import ScriptedDoor
from tests.text.answers import Answer
from tests.text.small_tokenizer import TEMPLATE, random_cut, write_tokenizer
from tests.text.test_xml_calls import call as xml_call

HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


LONG = '{"path": "' + "several words in a line\\n" * 30 + '", "n": 7}'
THOUGHTS = "<think>\nfirst\n\nthen\n</think>\n\n"
SCRIPTS = {
    "words": "Plain words, naïve 日本語 \U0001f9f5.",
    "thoughts": THOUGHTS + "Fine.",
    "thoughts alone": "<think>\nnever ends",
    "no thoughts": "<think>\n\n</think>\n\nFine.",
    "broken tag": "<thin k>Fine</think>",
    "a call": call("add", '{"n": 2}'),
    "words and a call": "Now.\n" + call("add", '{"n": 2}') + "\n",
    "calls and words": call("add", "{}") + "\nbetween\n\n" + call("add", '{"n": [1, {"a": "}"}]}') + "after  ",
    "thoughts and calls": THOUGHTS + call("add", '{"path": "é"}') + "\n" + call("add", "{}"),
    "call in thoughts": "<think>\n" + call("add", "{}") + "\n</think>\n\n" + call("add", "{}"),
    "a long call": call("write", LONG) + "\nafter",
    "a long call after words": THOUGHTS + "Now: " + call("write", LONG),
    "a long call, cut": call("write", LONG)[:700],
    "a long call, broken": call("write", LONG).replace('"n": 7', '"n": <7>'),
    "a call, cut": "Now. " + call("add", '{"n": 2}')[:30],
    "malformed": '<tool_call>\n{"name": add}\n</tool_call> words ' + call("add", "{}"),
    "no object": "<tool_call>\nwords\n</tool_call>",
    "empty": "",
    "newlines": "\n\nFine.\n\n",
    "space before a call": THOUGHTS + " \n " + call("add", "{}") + " \n ",
    "xml": "Now.\n" + xml_call("write", path="a\n<b>", n="7") + "\nThen " + xml_call("ping"),
    "xml, long": THOUGHTS + xml_call("write", path="line\n" * 200, n="7") + "\nafter",
    "xml, cut": xml_call("write", path="line\n" * 200)[:800],
    "xml, malformed": "<tool_call>\n<function=f>\nwords\n</function>\n</tool_call> words",
}


def model_with(folder: Path, template: str) -> ServedModel:
    tokenizer = Tokenizer.load(write_tokenizer(folder, template=template))
    limits = ModelLimits(max_model_len=4096, vocab_size=512, max_kv_tokens=4096)
    preprocessor = Preprocessor(tokenizer, limits, GenerationDefaults(eos_token_ids=(tokenizer.eos_token_id or 0,)))
    return ServedModel(name="m", created=1, limits=limits, tokenizer=tokenizer, preprocessor=preprocessor)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    xml = TEMPLATE + "{# <function=name> #}"
    return {
        "hermes": model_with(tmp_path_factory.mktemp("hermes"), TEMPLATE),
        "xml": model_with(tmp_path_factory.mktemp("xml"), xml),
    }


def deltas_of(
    model: ServedModel, prompt: PreparedRequest, groups: Sequence[Sequence[int]], finish: FinishReason
) -> list[Delta]:
    request: GenerateRequest = prompt.choices[0]
    processor = ChoiceProcessor(model.tokenizer, prompt.policy, request)
    outputs = [RequestOutput(request.request_id, tuple(ids)) for ids in groups[:-1]]
    last = RequestOutput(request.request_id, tuple(groups[-1]), finish)
    return [processor.feed(output) for output in [*outputs, last]]


def without_ids(value: Any) -> Any:
    """Ids are random, times pass."""
    if isinstance(value, dict):
        dropped = ("id", "call_id", "created_at", "completed_at")
        return {key: without_ids(item) for key, item in value.items() if key not in dropped}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def grouped(ids: Sequence[int], rng: random.Random | None) -> list[list[int]]:
    if rng is None:
        return [list(ids)]
    groups: list[list[int]] = [[]]
    odds = rng.choice((0.05, 0.3, 0.7, 1.0))
    for token_id in ids:
        if rng.random() < odds:
            groups.append([])
        groups[-1].append(token_id)
    return groups


class Routes:
    """The three routes' ways to join the deltas of one answer."""

    def __init__(self, model: ServedModel) -> None:
        tool = {"name": "write", "parameters": PARAMETERS}
        chat = ChatCompletionRequest(messages=HI, tools=[{"type": "function", "function": tool}])
        anthropic_tool = {"name": "write", "input_schema": PARAMETERS}
        messages = MessagesRequest(messages=HI, max_tokens=9, thinking={"type": "adaptive"}, tools=[anthropic_tool])
        self._model = model
        self._chat = model.preprocessor.chat(chat, "r")
        self._messages = model.preprocessor.chat(chat_of(messages), "r")
        self._responses = ResponsesRequest(input="hi", tools=[{"type": "function"} | tool])

    def chat(self, groups: Sequence[Sequence[int]], finish: FinishReason) -> Answer:
        answer = Answer()
        for delta in deltas_of(self._model, self._chat, groups, finish):
            answer.add(delta)
        return answer

    def messages(self, groups: Sequence[Sequence[int]], finish: FinishReason) -> Any:
        parts = Parts()
        for delta in deltas_of(self._model, self._messages, groups, finish):
            parts.feed(delta)
        return without_ids([message_block(part) for part in parts.all])

    def responses(self, groups: Sequence[Sequence[int]], finish: FinishReason) -> Any:
        door = ScriptedDoor([self._model])
        work = responses_route.prepare(self._model, self._responses, door, (), lambda id_, response: None)
        for delta in deltas_of(self._model, work.generation.prompts[0], groups, finish):
            work.answer.feed(delta)
        return without_ids(work.answer.response)


@pytest.mark.parametrize("num_groupings", [12, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_grouping_changes_nothing(models: dict[str, ServedModel], script: str, num_groupings: int) -> None:
    model = models["xml" if script.startswith("xml") else "hermes"]
    routes, rng = Routes(model), random.Random(script)
    finish = FinishReason.LENGTH if "cut" in script else FinishReason.STOP
    tokenizer = model.tokenizer
    pieces = {tokenizer.token_bytes(i): i for i in range(tokenizer.num_tokens) if tokenizer.token_bytes(i)[:1] != b"<"}
    pieces[b"<"] = tokenizer.encode("<", allow_special=False)[0]
    cuts = [tokenizer.encode(SCRIPTS[script], allow_special=True), random_cut(pieces, SCRIPTS[script], rng)]
    for ids in cuts:
        whole = [join([ids], finish) for join in (routes.chat, routes.messages, routes.responses)]
        for _ in range(num_groupings // len(cuts)):
            groups = grouped(ids, rng)
            assert routes.chat(groups, finish) == whole[0]
            assert routes.messages(groups, finish) == whole[1]
            assert routes.responses(groups, finish) == whole[2]
