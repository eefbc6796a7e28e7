"""A client's conversation and tools, checked and brought into the one form that chat templates understand.

Templates drop or misprint what they do not expect (an unknown role, content that is null or a list), so nothing
unexpected reaches them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nanoserve.core.errors import InvalidRequestError

Message = dict[str, Any]

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_OTHER_MEDIA = ("image", "audio", "video", "file")
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation for a template: string contents, four roles, no nulls, no fields that no template knows.

    ``developer`` becomes ``system``; text parts are joined with nothing between them; an assistant's missing content is
    ``""``; names and unknown fields are dropped; thoughts in front of an assistant's content become
    ``reasoning_content``, which templates drop or keep by their own rule.

    Raises:
        InvalidRequestError: a message has an unknown role, content other than text, or broken tool calls.
    """
    if not messages:
        raise _bad("`messages` must hold at least one message.")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any], ...]:
    """The tools as given, once their names and parameters are known to be usable.

    Raises:
        InvalidRequestError: a tool is not a function with a valid name and an object of parameters.
    """
    for index, tool in enumerate(tools or ()):
        _check_function(tool, f"tools[{index}]")
    return tuple(tools or ())


def strings_in(value: object) -> Iterator[str]:
    """Every string inside a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            if not isinstance(item, int):  # long lists of token ids
                yield from strings_in(item)


def check_unicode(value: object, param: str) -> None:
    """Refuse half of a surrogate pair, which is valid in JSON but is no text.

    Raises:
        InvalidRequestError: a string inside ``value`` holds one.
    """
    try:
        json.dumps(value, ensure_ascii=False, skipkeys=True, default=repr).encode()  # ten times as fast as a walk
    except UnicodeEncodeError:
        raise _bad(f"`{param}` holds half of a surrogate pair, which is not valid text.", param) from None
    except RecursionError:
        raise _bad(f"`{param}` is nested too deeply.", param) from None


def _bad(message: str, param: str = "messages") -> InvalidRequestError:
    return InvalidRequestError(message, param=param)


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"`{where}.role` must be one of {', '.join(_ROLES)}. Given: {role!r:.100}.")
    role = _ROLES[role]
    content = _content(message.get("content"), role, where)
    if role == "assistant":
        return _assistant(message, content, where)
    if role == "tool" and isinstance(message.get("name"), str):
        return {"role": role, "content": content, "name": message["name"]}
    return {"role": role, "content": content}


def _content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None or content == []:
        if role in ("assistant", "tool"):
            return ""
        raise _bad(f"`{where}.content` must be text or a list of text parts. Given: {content!r}.")
    if not isinstance(content, list):
        raise _bad(f"`{where}.content` must be text or a list of text parts. Given: {content!r:.100}.")
    return "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise _bad(f"`{where}` must be an object with a `type`. Given: {part!r:.100}.")
    if any(medium in kind for medium in _OTHER_MEDIA):
        raise _bad(f"`{where}` is of type {kind!r:.40}, but this model takes text only.")
    if kind not in _TEXT_PARTS:
        raise _bad(f"`{where}.type` must be 'text'. Given: {kind!r:.40}.")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _bad(f"`{where}.{_TEXT_PARTS[kind]}` must be a string. Given: {text!r:.100}.")
    return text


def _assistant(message: Mapping[str, Any], content: str, where: str) -> Message:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str):
        reasoning, content = _split_thoughts(content)
    result: Message = {"role": "assistant", "content": content}
    if reasoning:
        result["reasoning_content"] = reasoning
    if calls := _tool_calls(message, where):
        result["tool_calls"] = calls
    return result


def _split_thoughts(content: str) -> tuple[str, str]:
    """(reasoning, content) as Qwen3's template splits them, done before control tokens in the content are disarmed."""
    if "</think>" not in content:
        return "", content
    reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return reasoning, content.split("</think>")[-1].lstrip("\n")


def _tool_calls(message: Mapping[str, Any], where: str) -> list[Message]:
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), dict):  # the field's older form, one call
        calls = [{"function": message["function_call"]}]
    if not isinstance(calls or [], list):
        raise _bad(f"`{where}.tool_calls` must be a list. Given: {calls!r:.100}.")
    return [_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls or [])]


def _tool_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad(f"`{where}.function` must have a `name`. Given: {call!r:.100}.")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    if not is_json_object(text or "{}"):
        raise _bad(f"`{where}.function.arguments` must be a JSON object, as text. Given: {text!r:.100}.")
    return {"type": "function", "function": {"name": function["name"], "arguments": text or "{}"}}


def is_json_object(text: str) -> bool:
    """Whether a text is exactly one JSON object (NaN and Infinity are no JSON)."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


def _check_function(tool: Mapping[str, Any], where: str) -> None:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise _bad(f"`{where}` must be of type 'function' with a `function` object. Given: {tool!r:.100}.", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        raise _bad(
            f"`{where}.function.name` must be 1 to 128 letters, digits, or any of _.:- . Given: {name!r:.100}.", "tools"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise _bad(f"`{where}.function.parameters` must be a JSON schema object. Given: {parameters!r:.100}.", "tools")
    if (kind := (parameters or {}).get("type", "object")) != "object":
        raise _bad(f"`{where}.function.parameters` must be of type 'object'. Given: {kind!r:.60}.", "tools")


def function_names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]
