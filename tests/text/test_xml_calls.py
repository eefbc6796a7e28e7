"""Qwen3-Coder's calls in a stream: typed arguments, nothing lost, the same in every cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.text.tools import ToolParser
from nanoserve.text.xml_calls import STREAM_AFTER, XmlCall, typed

PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "n": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "object"},
    "on": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
}
SCHEMAS = {"write": PROPERTIES}


def call(name: str, **values: str) -> str:
    elements = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{elements}</function>\n</tool_call>"


def parse(pieces: list[str], *, parallel: bool = True) -> tuple[str, list[tuple[str, str]], int]:
    """(content, (name, arguments as text) of each call, number of calls that count)."""
    parser = ToolParser(parallel=parallel, new_call=lambda: XmlCall(SCHEMAS))
    content, calls = "", list[tuple[str, str]]()
    for text, deltas in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        content += text
        for delta in deltas:
            if delta.name is not None:
                assert delta.id
                calls.append((delta.name, ""))
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return content, calls, parser.num_calls


LONG = 'line "one"\n\tline </parameter> two\n' * 30
assert len(LONG) > STREAM_AFTER


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call("ping"), "", [("ping", {})]),
        (call("write", path="a b", n="7"), "", [("write", {"path": "a b", "n": 7})]),
        (call("write", path="7", ratio="7", on="True"), "", [("write", {"path": "7", "ratio": 7, "on": True})]),
        (call("write", deep='{"x": [1, "é"]}'), "", [("write", {"deep": {"x": [1, "é"]}})]),
        (call("write", maybe="null", either="x"), "", [("write", {"maybe": None, "either": "x"})]),
        (call("write", n="many", unknown="1"), "", [("write", {"n": "many", "unknown": "1"})]),
        (call("other", x="1"), "", [("other", {"x": "1"})]),
        (call("write", path=LONG), "", [("write", {"path": LONG})]),
        (call("write", path=LONG, n="3"), "", [("write", {"path": LONG, "n": 3})]),
        (call("write", path="a </parameter> b"), "", [("write", {"path": "a </parameter> b"})]),
        ("Now.\n" + call("write", path="a\n\nb") + "\nDone.", "Now.\nDone.", [("write", {"path": "a\n\nb"})]),
        (call("ping") + "\n" + call("ping"), "", [("ping", {}), ("ping", {})]),
        ("<tool_call><function=ping></function></tool_call>", "", [("ping", {})]),
        ("<tool_call>\n<function=ping>\n</function>", "", [("ping", {})]),
    ],
)
def test_calls(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    for pieces in ([text], list(text)):
        told, found, num_calls = parse(pieces)
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls
        assert told.strip("\n") in (content, content.replace("\n", "\n\n"))
        assert num_calls == len(calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\nfunction\n</tool_call>",
        "<tool_call>\n<function=a>\nwords\n</function>\n</tool_call>",
        "<tool_call>\n<function=a>\n<parameter=x>\n1\n",
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>',
        "<tool_call>",
    ],
)
def test_what_is_no_call_comes_back_as_it_was(text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(pieces) == (text, [], 0)


def test_a_long_text_is_shown_while_it_comes_and_counts_once_it_is_whole() -> None:
    text = call("write", path=LONG)
    cut = len(text) - 60
    parser = ToolParser(new_call=lambda: XmlCall(SCHEMAS))
    shown = [delta for piece in text[:cut] for delta in parser.feed(piece)[1]]
    assert len("".join(delta.arguments for delta in shown)) > cut - 200
    assert parser.num_calls == 0
    _, [(_, arguments)], num_calls = parse([text[:cut]])
    assert num_calls == 0
    assert arguments.startswith('{"path": "line \\"one\\"')


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("1", {"type": "string"}, "1"),
        ("1", {"type": "integer"}, 1),
        ("1.0", {"type": "integer"}, 1),
        ("1.5", {"type": "integer"}, "1.5"),
        ("true", {"type": "integer"}, "true"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e3", {"type": "number"}, 1000.0),
        ("[1]", {"type": "array"}, [1]),
        ("[1", {"type": "array"}, "[1"),
        ("2", {"enum": [1, 2]}, 2),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("x", None, "x"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
    ],
)
def test_types(text: str, schema: object, value: object) -> None:
    assert typed(text, schema) == value
    assert type(typed(text, schema)) is type(value)


TOKENS = [
    "<tool_call>", "</tool_call>", "\n", " ", "<function=write>", "<function=f>", "</function>", "<parameter=path>",
    "<parameter=n>", "<parameter=", "</parameter>", "<", ">", "7", '"', "\\", "x" * 300, call("write", path="a\nb"),
    call("write", n="1", path="c"), "text",
]  # fmt: skip


@given(tokens=st.lists(st.sampled_from(TOKENS), max_size=14), parallel=st.booleans(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_cut_changes_nothing(tokens: list[str], parallel: bool, data: st.DataObject) -> None:
    text = "".join(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, parallel=parallel) == parse([text], parallel=parallel) == parse(list(text), parallel=parallel)
