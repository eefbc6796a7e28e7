"""Specs become grammars, or one clear sentence."""

import json

import pytest

from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.sampling import StructuredOutputs
from nanoserve.text.grammar import grammar_text, tool_call_grammar


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"foo": "bar"}},
        {"type": "objekt"},
        {"$ref": "#/$defs/missing"},
        {"type": "array", "minItems": 3, "maxItems": 1},
    ],
)
def test_a_bad_schema_is_refused_with_its_reason(schema: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        grammar_text(StructuredOutputs(json=json.dumps(schema)), param="response_format")
    assert caught.value.param == "response_format"
    assert len(caught.value.message) > 40


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutputs(json="not json"),
        StructuredOutputs(regex="(?P<x>"),
        StructuredOutputs(grammar="start: nowhere"),
        StructuredOutputs(choice=()),
        StructuredOutputs(json=json.dumps({"enum": ["x" * 300_000]})),
    ],
)
def test_bad_grammars_of_every_kind_are_refused(spec: StructuredOutputs) -> None:
    with pytest.raises(InvalidRequestError):
        grammar_text(spec)


def test_a_schema_that_would_take_seconds_to_compile_is_refused() -> None:
    schema: dict[str, object] = {"anyOf": [{"properties": {f"p{index}": {} for index in range(501)}} for _ in range(2)]}
    with pytest.raises(InvalidRequestError, match="1000 properties"):
        grammar_text(StructuredOutputs(json=json.dumps(schema)))


def test_exactly_one_kind_is_asked_for() -> None:
    with pytest.raises(InvalidRequestError, match="must set one"):
        StructuredOutputs(json="{}", regex="a")
    with pytest.raises(InvalidRequestError, match="must set one"):
        StructuredOutputs()


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex="[0-9]+"),
        StructuredOutputs(choice=("yes", 'a"b\\c', "日本")),
        StructuredOutputs(grammar='start: "a" | "b"'),
        StructuredOutputs(tags=(("<a", "<a>", "{}", "</a>"),)),
    ],
)
def test_good_specs_give_a_grammar(spec: StructuredOutputs) -> None:
    assert grammar_text(spec)


def test_tool_calls_have_a_grammar_and_bad_parameters_do_not() -> None:
    tools = [
        {"name": "ping", "parameters": {}},
        {"name": "add", "parameters": {"properties": {"x": {"type": "integer"}}}},
    ]
    assert "arguments_1" in tool_call_grammar(tools)
    with pytest.raises(InvalidRequestError) as caught:
        tool_call_grammar([{"name": "f", "parameters": {"properties": {"a": {"type": "weird"}}}}])
    assert caught.value.param == "tools"
