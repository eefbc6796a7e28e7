"""Answers of a given form through the whole service: bad forms are refused, good ones are kept by a model of noise."""

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from tests.cases.conftest import Serve
from tests.cases.rig import Rig
from tests.cases.service import CHAT, NO_THINKING, content, finish, message
from tests.cases.test_conversations import CALL_TEXT, ROUTE

TREE = {
    "type": "object",
    "properties": {"v": {"type": "boolean"}, "kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/T"}}},
    "required": ["v"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "enum behind a ref": {
        "type": "object",
        "properties": {"car": {"$ref": "#/$defs/C"}},
        "required": ["car"],
        "additionalProperties": False,
        "$defs": {"C": {"enum": ["sedan", "SUV", "日本 \U0001f9f5", 'a"b\\c']}},
    },
    "pattern and length": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 6},
    },
    "type list and bounds": {
        "type": "object",
        "properties": {"n": {"type": ["integer", "null"], "minimum": -5, "maximum": 12}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "recursion": {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/T"}},
        "required": ["t"],
        "additionalProperties": False,
        "$defs": {"T": TREE},
    },
    "any of constants": {
        "anyOf": [{"const": None}, {"const": 3.5}, {"type": "object", "properties": {}, "additionalProperties": False}]
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "odd names": {
        "type": "object",
        "properties": {"": {"type": "boolean"}, "a b": {"enum": [1, "1", True]}},
        "required": ["", "a b"],
        "additionalProperties": False,
    },
}


def form(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}


@pytest.mark.parametrize("num_seeds", [4, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_an_accepted_schema_is_kept(rig: Rig, serve: Serve, name: str, num_seeds: int) -> None:
    async with serve(rig.sens(), max_num_seqs=16) as service:
        body: dict[str, Any] = {
            "temperature": 1.0,
            "max_tokens": 400,
            "response_format": form(SCHEMAS[name]),
            **NO_THINKING,
        }
        first = await service.post(CHAT, **body, seed=4)
        if first.status_code == 400:  # what the grammar library cannot do is said by name
            assert "properties" in first.text.lower()
            return
        for seed in range(num_seeds):
            reply = await service.same(**body, seed=seed)
            if finish(reply) == "stop":
                jsonschema.validate(json.loads(content(reply)), SCHEMAS[name])


BAD: list[Any] = [
    form({"type": "object", "properties": {"foo": "bar"}}),
    form({"type": "objekt"}),
    {"type": "json_schema"},
    {"type": "yaml"},
    form({"$ref": "#/$defs/missing"}),
    form({"type": "array", "minItems": 3, "maxItems": 1}),
    form({"type": "string", "pattern": "("}),
    form({"properties": {str(index): {} for index in range(1001)}}),
    {"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": ["<b"]},
]


async def test_a_bad_form_is_refused_while_others_go_on(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        ordinary = [{"seed": seed, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True} for seed in range(6)]
        alone = [content(await service.chat(**body)) for body in ordinary]
        running = [asyncio.create_task(service.chat(**body)) for body in ordinary]
        for wanted in BAD:
            await service.refuses(response_format=wanted, max_tokens=5, param="response_format")
        weird = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "weird"}}}}}
        await service.refuses(tools=[weird], tool_choice="required", param="tools")
        strict = {"type": "function", "function": weird["function"] | {"strict": True}}  # type: ignore[operator]
        await service.refuses(tools=[strict], param="tools")
        assert [content(await task) for task in running] == alone


async def test_choices_regexes_and_grammars_in_every_spelling(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        for kind, value, allowed in (
            ("choice", ["yes", "no"], {"yes", "no"}),
            ("regex", "[ab]{2}", {"aa", "ab", "ba", "bb"}),
            ("grammar", 'start: "x" ("y" | "z")', {"xy", "xz"}),
            ("json", {"enum": [1, "u"]}, {"1", '"u"'}),
        ):
            for fields in ({f"guided_{kind}": value}, {"structured_outputs": {kind: value}}):
                reply = await service.chat(**fields, temperature=1.0, seed=1, **NO_THINKING)
                assert content(reply) in allowed
                assert (await service.text("go", **fields, temperature=1.0, seed=1))["choices"][0]["text"] in allowed
        tag = {"structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}], "triggers": ["<n"]}
        await service.chat(response_format={"type": "structural_tag"} | tag, max_tokens=4, seed=1, temperature=1.0)
        await service.refuses(guided_regex="a", structured_outputs={"choice": ["x"]})


async def test_tool_choices(rig: Rig, serve: Serve) -> None:
    folder, _ = rig.script(CALL_TEXT, thinking=False)
    async with serve(folder) as service:
        fields: dict[str, Any] = {"temperature": 0, **NO_THINKING}
        frees: list[dict[str, Any]] = [{"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tool_choice": "none"}]
        for free in frees:
            await service.chat(**fields, **free, max_tokens=1)
        silent = await service.same(**fields, tools=[ROUTE], tool_choice="none")
        assert "tool_calls" not in message(silent)
        assert finish(silent) == "stop"
        assert len(message(await service.same(**fields, tools=[ROUTE]))["tool_calls"]) == 1
        await service.refuses(tools=[], tool_choice="required", param="tool_choice")
        await service.refuses(
            tools=[ROUTE], tool_choice={"type": "function", "function": {"name": "nope"}}, param="tool_choice"
        )
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "nope"}}]}
        await service.refuses(
            tools=[ROUTE], tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, param="tool_choice"
        )
        bad = {"type": "function", "function": {"name": "bad name!", "parameters": "x"}}
        await service.refuses(tools=[bad], param="tools")
