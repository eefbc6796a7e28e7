"""A body of OpenAI's Responses API as a chat: items become messages, flat tools nested ones, formats response formats.

The functions raise InvalidRequestError for what no chat can say; ``param`` names the field of the body.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanoserve.core.errors import InvalidRequestError
from nanoserve.protocol.openai import ChatCompletionRequest, SamplingBody
from nanoserve.protocol.openai_responses import ResponsesRequest, unsealed

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_of(body: ResponsesRequest, messages: Sequence[Message]) -> ChatCompletionRequest:
    """The chat that a body asks for; ``messages`` are those of the conversation before it and of its own input."""
    _check(body)
    rule = [{"role": "system", "content": body.instructions}] if body.instructions else []
    reasoning, top = body.reasoning or {}, body.top_logprobs
    return ChatCompletionRequest(
        **{name: getattr(body, name) for name in SamplingBody.model_fields},
        messages=[*rule, *messages],
        max_completion_tokens=body.max_output_tokens,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text or {}),
        reasoning_effort=_optional_string(reasoning, "effort", "reasoning"),
        thinking_token_budget=body.thinking_token_budget,
        chat_template_kwargs=body.chat_template_kwargs,
        logprobs=body.wants_logprobs or None,
        top_logprobs=top if body.wants_logprobs else None,
    )


def input_messages(body: ResponsesRequest) -> list[Message]:
    """The messages of a body's input."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return messages_of(body.input)


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Items as messages: thoughts, words and calls of the assistant that follow each other are one message."""
    messages: list[Message] = []
    for index, item in enumerate(items):
        kind = item.get("type") or ("message" if "role" in item else None)
        if not isinstance(kind, str) or kind not in _ITEMS:
            known = ", ".join(_ITEMS)
            raise _bad(f"`input[{index}].type` must be one of {known}. Given: {kind!r:.60}.", "input")
        _ITEMS[kind](messages, item, f"input[{index}]")
    return messages


def _bad(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)


def _check(body: ResponsesRequest) -> None:
    if body.background:
        raise _bad("`background` is not supported: read the answer from the reply or the stream.", "background")
    if body.conversation is not None:
        raise _bad("`conversation` is not supported; use `previous_response_id` or send all of it.", "conversation")
    if body.prompt is not None:
        raise _bad("`prompt` templates are not stored here; send their text as `input`.", "prompt")
    if body.truncation not in (None, "auto", "disabled"):
        raise _bad(f"`truncation` must be auto or disabled. Given: {body.truncation!r:.60}.", "truncation")


def _turn(messages: list[Message], *, taken: Sequence[str]) -> Message:
    """The assistant's message that an item belongs to: the last one while it has nothing of what is ``taken`` yet."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in taken):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _message(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise _bad(f"`{where}.role` must be one of {', '.join(_ROLES)}. Given: {role!r:.60}.", "input")
    text = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        _turn(messages, taken=("content", "tool_calls"))["content"] = text
    else:
        messages.append({"role": role, "content": text})


def _reasoning(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    thoughts = _text(item.get("content") or item.get("summary") or "", f"{where}.content")
    sealed = item.get("encrypted_content")
    if not item.get("content") and isinstance(sealed, str):
        thoughts = unsealed(sealed) or thoughts
    if thoughts:
        _turn(messages, taken=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = thoughts


def _function_call(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise _bad(f"`{where}` must have a `name` and `arguments`, both strings.", "input")
    call = {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}
    _turn(messages, taken=()).setdefault("tool_calls", []).append(call)


def _function_call_output(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    output = item.get("output")
    text = _text(output, f"{where}.output") if isinstance(output, str | list) else json.dumps(output)
    messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})


_ITEMS: Mapping[str, Callable[[list[Message], Mapping[str, Any], str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"`{where}` must be text or a list of text parts. Given: {content!r:.100}.", "input")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in (*_TEXT_TYPES, "refusal"):
        raise _bad(f"`{where}` must be text: this model takes text only. Given: type {kind!r:.60}.", "input")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise _bad(f"`{where}.text` must be a string. Given: {text!r:.100}.", "input")
    return text


def _optional_string(fields: Mapping[str, Any], name: str, param: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _bad(f"`{param}.{name}` must be a string. Given: {value!r:.60}.", param)
    return value


def _tool(tool: Mapping[str, Any], where: str) -> Message:
    kind = tool.get("type")
    if kind != "function":
        raise _bad(f"`{where}` is of type {kind!r:.60}, which this server does not have; only functions.", "tools")
    optional = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": tool.get("name")} | optional}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | Message | None:
    """Responses name a function at the top, chats inside of ``function``."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_tool_choice(tool) for tool in choice["tools"] if isinstance(tool, dict)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise _bad(f"`tool_choice` must name functions. Given: type {choice.get('type')!r:.60}.", "tool_choice")


def _response_format(text: Mapping[str, Any]) -> Message | None:
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise _bad(f"`text.format` must be text, json_object or json_schema. Given: {form!r:.100}.", "text")
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    if not isinstance(form.get("schema"), dict):
        raise _bad("`text.format.schema` must be a JSON schema.", "text")
    return {"type": "json_schema", "json_schema": {key: form[key] for key in ("name", "schema") if key in form}}
