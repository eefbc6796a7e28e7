"""A chunk is exactly the JSON that a plain encoder would give."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.protocol.sse import ChunkTemplate, event, members, usage_event

ENVELOPE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": 'a "b" é'}
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def decoded(chunk: bytes) -> object:
    """The JSON of one event; its only line breaks are those that end it."""
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n") == 2
    return orjson.loads(chunk[len(b"data: ") :].decode("utf-8"))


@given(TEXT)
def test_a_chunk_is_the_json_of_its_parts(text: str) -> None:
    template = ChunkTemplate(ENVELOPE, index=3, member="delta")
    chunk = template.render(orjson.dumps({"content": text}))
    choice = {"index": 3, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    assert decoded(chunk) == {**ENVELOPE, "choices": [choice]}


def test_every_part_lands_where_it_belongs() -> None:
    template = ChunkTemplate(ENVELOPE, index=0, member="text")
    extra = members(stop_reason=None, seed=5)
    chunk = template.render(b'"x"', logprobs=b"{}", finish=b'"stop"', extra=extra, top=members(usage=None))
    choice = {"index": 0, "text": "x", "logprobs": {}, "finish_reason": "stop", "stop_reason": None, "seed": 5}
    assert decoded(chunk) == {**ENVELOPE, "choices": [choice], "usage": None}


def test_the_usage_event_has_no_choices() -> None:
    assert decoded(usage_event(ENVELOPE, {"total_tokens": 3})) == {
        **ENVELOPE,
        "choices": [],
        "usage": {"total_tokens": 3},
    }


def test_no_members_are_no_bytes() -> None:
    assert members() == b""
    assert event(b"{}") == b"data: {}\n\n"
