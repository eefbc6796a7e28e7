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
        StructuredOutputs(grammar="root ::= ("),
        StructuredOutputs(grammar='other ::= "a"'),
        StructuredOutputs(grammar="root ::= " + "(" * 5000),
        StructuredOutputs(choice=()),
        StructuredOutputs(json=json.dumps({"enum": ["x" * 300_000]})),
    ],
)
def test_bad_grammars_of_every_kind_are_refused(spec: StructuredOutputs) -> None:
    with pytest.raises(InvalidRequestError):
        grammar_text(spec)


@pytest.mark.parametrize(
    "keyword, value",
    [
        ("uniqueItems", True), ("not", {}), ("if", {}), ("dependentRequired", {}), ("contains", {}),
        ("propertyNames", {}), ("unevaluatedProperties", False), ("format", "postal"),
        ("oneOf", [{"minimum": 3}, {"maximum": 5}]), ("x-guidance", {"lenient": True}), ("$ref", "http://else/where"),
    ],
)  # fmt: skip
def test_a_keyword_that_cannot_be_kept_is_refused_by_name(keyword: str, value: object) -> None:
    """Ignored, it would let an answer through that breaks the schema."""
    with pytest.raises(InvalidRequestError) as caught:
        grammar_text(StructuredOutputs(json=json.dumps({"properties": {"a": {keyword: value}}})))
    named = {"$ref": "else/where", "format": "postal"}.get(keyword, keyword)
    assert named in caught.value.message


def chain(length: int) -> dict[str, object]:
    """A schema whose references go so many levels deep, and no level of it is deep."""
    steps: dict[str, object] = {"0": {}}
    for number in range(1, length):
        steps[str(number)] = {"items": {"items": {"items": {"$ref": f"#/$defs/{number - 1}"}}}}
    return {"$ref": f"#/$defs/{length - 1}", "$defs": steps}


NAMES = [f"p{index}" for index in range(1001)]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {name: {} for name in NAMES}}, "1000 properties"),
        ({"required": NAMES}, "1000 properties"),
        ({"anyOf": [{"const": name} for name in NAMES]}, "1000 properties"),
        ({"patternProperties": {f"^k{index}x": {} for index in range(900)}}, "more than 1 s"),
        (chain(900), "nested too deeply"),
    ],
)
def test_a_schema_that_explodes_is_refused_wherever_it_stands_and_the_next_one_is_not(
    schema: dict[str, object], reason: str
) -> None:
    """A chain of references overflows the library's stack, which ends the process that compiles it."""
    with pytest.raises(InvalidRequestError, match=reason):
        grammar_text(StructuredOutputs(json=json.dumps(schema)))
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        tool_call_grammar([{"name": "f", "parameters": schema}])
    assert caught.value.param == "tools"
    assert grammar_text(StructuredOutputs(json=json.dumps(chain(100))))


def test_what_a_client_wrote_itself_is_shorter() -> None:
    inner = json.dumps({"required": [f"p{index}" for index in range(5000)]})
    for spec in (StructuredOutputs(grammar=f"start: %json {inner}"), StructuredOutputs(regex="a?" * 20_000)):
        with pytest.raises(InvalidRequestError, match="characters"):
            grammar_text(spec)


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
        StructuredOutputs(grammar='root ::= [a-z]{2} ws\nws ::= " "*'),
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
