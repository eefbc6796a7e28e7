"""Anthropic's Messages API: request bodies, and the objects and events of an answer as plain dicts.

Bodies are as lenient as OpenAI's: unknown members are ignored. What their content means is read by ``text``.
"""

import base64
from hashlib import blake2b
from typing import Any

import orjson
from pydantic import Field

from nanoserve.core.errors import NanoserveError
from nanoserve.protocol.errors import messages_envelope
from nanoserve.protocol.openai import SamplingBody
from nanoserve.protocol.responses import Json

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CountTokensRequest(SamplingBody):
    """The body of ``POST /v1/messages/count_tokens``: all that makes a prompt.

    ``chat_template_kwargs`` is an extension: arguments of the model's own template.
    """

    messages: list[dict[str, Any]] = Field(fail_fast=True)
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """The body of ``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: list[Any] | None = None


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> Json:
    """Anthropic's ``input_tokens`` are those that were not read from the cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def message(id_: str, model: str, *, content: list[Json], usage: Json, stop: Json | None = None) -> Json:
    start: Json = {"id": id_, "type": "message", "role": "assistant", "model": model, "content": content}
    return start | (stop or stop_members(None, None)) | {"usage": usage}


def stop_members(finish_reason: str | None, stop_reason: int | str | None) -> Json:
    """Why an answer ended, in Anthropic's words; a stop string is told by name."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _STOP_REASONS.get(finish_reason or ""), "stop_sequence": None}


def text_block(text: str) -> Json:
    return {"type": "text", "text": text}


def thinking_block(thinking: str) -> Json:
    return {"type": "thinking", "thinking": thinking, "signature": signature(thinking) if thinking else ""}


def tool_use_block(id_: str, name: str, arguments: str) -> Json:
    """A call. Arguments that were cut off are no JSON any more, and given as no arguments."""
    try:
        input_ = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        input_ = {}
    return {"type": "tool_use", "id": id_, "name": name, "input": input_}


def signature(thinking: str) -> str:
    """Clients send thoughts back with a signature and expect one. This one only says that nothing was changed."""
    return base64.b64encode(blake2b(thinking.encode("utf-8", "replace"), digest_size=24).digest()).decode()


def error_event(error: NanoserveError) -> bytes:
    return b"event: error\ndata: " + messages_envelope(error) + b"\n\n"
