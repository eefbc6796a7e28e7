"""OpenAI's Responses API: the request body, and the objects and events of an answer as plain dicts."""

import base64
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from nanoserve.core.errors import NanoserveError
from nanoserve.protocol.errors import as_known, type_of
from nanoserve.protocol.openai import SamplingBody
from nanoserve.protocol.responses import Json

_ID_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class ResponsesRequest(SamplingBody):
    """The body of ``POST /v1/responses``. Items, tools and formats are read by ``text.from_responses``.

    ``chat_template_kwargs`` and ``thinking_token_budget`` are extensions, with the meaning that they have in chats.
    """

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = Field(default=None, fail_fast=True)
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def wants_encrypted_thoughts(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())


def response(id_: str, created: int, model: str, body: ResponsesRequest) -> Json:
    """A response that has just begun: all that its request settles."""
    return {
        "id": id_,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}} | (body.text or {}),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def input_items(given: str | Sequence[Json]) -> list[Json]:
    """The items of an input as they are listed afterwards: whole messages, and an id for each."""
    items: Sequence[Json] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_input_item(item) for item in items]


def _input_item(item: Json) -> Json:
    kind, content = str(item.get("type") or "message"), item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": part, "text": content} | ({"annotations": []} if part == "output_text" else {})]
    made = f"{_ID_PREFIX.get(kind, 'item')}_{uuid.uuid4().hex}"
    id_ = item["id"] if isinstance(item.get("id"), str) else made
    listed = {"type": kind, "status": "completed"} | item | {"type": kind, "id": id_}
    return listed if kind != "message" else listed | {"content": content}


def item_list(items: Sequence[Json], *, has_more: bool) -> Json:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": list(items), "first_id": first, "last_id": last, "has_more": has_more}


def usage(prompt_tokens: int, output_tokens: int, *, cached_tokens: int, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + output_tokens,
    }


def failure(error: NanoserveError) -> Json:
    """The ``error`` member of a failed response."""
    known = as_known(error)
    return {"code": known.code or type_of(known), "message": known.message}


def text_part(text: str, logprobs: Sequence[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def message_item(id_: str, status: str, content: Sequence[Json]) -> Json:
    return {"id": id_, "type": "message", "role": "assistant", "status": status, "content": list(content)}


def reasoning_item(id_: str, status: str, content: Sequence[Json], *, sealed: str | None = None) -> Json:
    """``sealed``: the thoughts for a client that keeps only ``encrypted_content``. They are encoded, not secret."""
    item: Json = {"id": id_, "type": "reasoning", "status": status, "summary": [], "content": list(content)}
    return item | {"encrypted_content": None if sealed is None else base64.b64encode(sealed.encode()).decode()}


def unsealed(text: str) -> str:
    """The thoughts of an ``encrypted_content``; empty for one that is not from here."""
    try:
        return base64.b64decode(text, validate=True).decode()
    except ValueError:
        return ""


def call_item(id_: str, status: str, *, call_id: str, name: str, arguments: str) -> Json:
    call: Json = {"id": id_, "type": "function_call", "status": status}
    return call | {"call_id": call_id, "name": name, "arguments": arguments}
