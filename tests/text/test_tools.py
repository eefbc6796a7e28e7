"""Tool calls in a stream: exact arguments, nothing lost, the same in every cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.text.tools import STREAM_AFTER, ToolParser

ROUTE = '{"from": "Łódź", "stops": [3, {"via": null}], "note": "a}b{c </tool_call> \\" \\\\"}'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parse(pieces: list[str], *, parallel: bool = True) -> tuple[str, list[tuple[str, str]], int]:
    """(content, (name, arguments) of each call, number of calls that count)."""
    parser = ToolParser(parallel=parallel)
    content, calls, ids = "", list[tuple[str, str]](), set()
    for text, deltas in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        content += text
        for delta in deltas:
            if delta.name is not None:
                assert delta.id
                ids.add(delta.id)
                calls.append((delta.name, ""))
                assert delta.index == len(calls) - 1
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    assert len(ids) == len(calls)
    return content, calls, parser.num_calls


LONG = json.dumps({"text": 'a "quoted" line\n' * 60, "n": [1, 2, {"deep": True}]})
assert len(LONG) > STREAM_AFTER


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call("find_route", ROUTE), "", [("find_route", ROUTE)]),
        (call("ping", "{}"), "", [("ping", "{}")]),
        ('<tool_call>{"name": "ping"}</tool_call>', "", [("ping", "{}")]),
        ('<tool_call>{"name": "ping", "arguments": null}</tool_call>', "", [("ping", "{}")]),
        ('<tool_call>{"arguments": {"x": 2}, "name": "add"}</tool_call>', "", [("add", '{"x": 2}')]),
        ('<tool_call>{"name": "add", "arguments": "{\\"x\\": 2}"}</tool_call>', "", [("add", '{"x": 2}')]),
        ('  <tool_call>\n\n{ "name" :"add","arguments":{"x":2} } </tool_call>\n', "", [("add", '{"x":2}')]),
        (call("a", "{}") + " " + call("b", '{"x": 1}'), "", [("a", "{}"), ("b", '{"x": 1}')]),
        (call("a", "{}") + call("b", "{}"), "", [("a", "{}"), ("b", "{}")]),
        ("Before.\n" + call("a", "{}") + "\nAfter. ", "Before.\nAfter. ", [("a", "{}")]),
        ('<tool_call>{"name": "a", "arguments": {"x": [1]}}', "", [("a", '{"x": [1]}')]),
        ('<tool_call>{"name": "a", "arguments": {}}\n<tool_call>{"name": "b"}', "", [("a", "{}"), ("b", "{}")]),
        (call("write", LONG), "", [("write", LONG)]),
        (call("write", LONG + ', "more": [{}]'), "", [("write", LONG)]),
        (call("write", LONG) + call("b", "{}"), "", [("write", LONG), ("b", "{}")]),
        (
            '<tool_call>{"name": "w", "arguments": {"x": "' + "y\n" * 9 + '"}}',
            "",
            [("w", json.dumps({"x": "y\n" * 9}))],
        ),
    ],
)
def test_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == (content, calls, len(calls))
    assert parse(list(text)) == (content, calls, len(calls))
    for _, arguments in calls:
        json.loads(arguments)


@pytest.mark.parametrize(
    "text",
    [
        "just words, 1 < 2, <tool",
        "trailing space \n",
        '<tool_call>{"name": "add", "arguments": {"x": 2,}}</tool_call>',
        "<tool_call>{'name': 'add', 'arguments': {}}</tool_call> and on",
        '<tool_call>{"name": "add", "arguments": {"x": 2}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"x": "open',
        "so: \n<tool_call>add(2, 3)</tool_call>",
        "<tool_call>",
        '<tool_call>{"name": "add", "arguments": {"x": ' + "[" * 300 + "</tool_call>",
    ],
)
def test_what_is_no_call_comes_back_as_it_was(text: str) -> None:
    assert parse([text]) == (text, [], 0)
    assert parse(list(text)) == (text, [], 0)


def test_a_valid_call_after_a_broken_one_is_found() -> None:
    broken = '<tool_call>{"name": "a", "arguments": {"x": "open}}</tool_call>'
    assert parse([broken, call("b", "{}")]) == (broken, [("b", "{}")], 1)


def test_every_cut_of_a_call_is_content_until_it_is_whole() -> None:
    text = call("find_route", ROUTE)
    whole = text.index("\n</tool_call>", text.index("\\\\"))
    for end in range(len(text) + 1):
        content, calls, count = parse([text[:end]])
        assert (content, calls, count) == (("", [("find_route", ROUTE)], 1) if end >= whole else (text[:end], [], 0))


def test_a_long_call_is_shown_as_it_comes_and_counts_once_it_is_whole() -> None:
    text = call("write", LONG)
    content, calls, count = parse(list(text[:-40]))
    assert (content, count) == ("", 0)
    assert LONG.startswith(calls[0][1])
    assert len(calls[0][1]) > STREAM_AFTER / 2


def test_a_long_call_that_turns_out_broken_does_not_count() -> None:
    text = call("write", '{"text": "' + "a" * STREAM_AFTER + '", oops}')
    for pieces in ([text], list(text)):
        _, calls, count = parse(pieces)
        assert (len(calls), count) == (1, 0)


def test_only_the_first_call_when_calls_may_not_be_parallel() -> None:
    text = call("a", '{"x": 1}') + "\n" + call("b", "{}")
    assert parse(list(text), parallel=False) == ("", [("a", '{"x": 1}')], 1)


TOKENS = [
    "<tool_call>", "</tool_call>", "\n", " ", '{"name": "f", "arguments": ', "{}", "}", '{"a": "', '\\"', '"', "\\",
    "[", "]", ", ", "1", "<", "</", "tool_call>", "x" * 300, call("f", '{"a": [1]}'), "text",
]  # fmt: skip


@given(tokens=st.lists(st.sampled_from(TOKENS), max_size=14), parallel=st.booleans(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_cut_changes_nothing(tokens: list[str], parallel: bool, data: st.DataObject) -> None:
    text = "".join(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, parallel=parallel) == parse([text], parallel=parallel) == parse(list(text), parallel=parallel)
