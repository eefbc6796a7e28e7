"""Server-sent events: one event is one ``data:`` line of JSON and a blank line, valid UTF-8 by itself.

Invariant: the constant part of a choice's chunks is rendered once; a token costs the JSON of its own text and one join.
"""

from collections.abc import Mapping

import orjson

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def named_event(payload: Mapping[str, object]) -> bytes:
    """An event whose name is its ``type``, as in OpenAI's Responses and Anthropic's Messages."""
    return b"event: %b\ndata: %b\n\n" % (str(payload["type"]).encode(), orjson.dumps(payload))


def usage_event(envelope: Mapping[str, object], usage: Mapping[str, object]) -> bytes:
    """The last event before ``[DONE]``: no choices, the usage of the whole request."""
    return event(orjson.dumps({**envelope, "choices": [], "usage": usage}))


def members(**fields: object) -> bytes:
    """``,"name":value`` for each field: members to append to a JSON object that is not empty."""
    return b"," + orjson.dumps(fields)[1:-1] if fields else b""


class ChunkTemplate:
    """The chunks of one choice, pre-rendered. ``member`` is "delta" (chat) or "text" (completions)."""

    __slots__ = ("_head",)

    def __init__(self, envelope: Mapping[str, object], *, index: int, member: str) -> None:
        self._head = b'data: %b,"choices":[{"index":%d,"%b":' % (
            orjson.dumps({**envelope}).removesuffix(b"}"),
            index,
            member.encode(),
        )

    def render(
        self, value: bytes, *, logprobs: bytes = b"null", finish: bytes = b"null", extra: bytes = b"", top: bytes = b""
    ) -> bytes:
        """One event. ``value``, ``logprobs``, ``finish``: JSON of the member, the logprobs, the finish reason.

        ``extra`` and ``top``: further ``members`` of the choice and of the chunk itself (its usage).
        """
        return b"".join(
            (self._head, value, b',"logprobs":', logprobs, b',"finish_reason":', finish, extra, b"}]", top, b"}\n\n")
        )
