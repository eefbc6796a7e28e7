"""A body of Anthropic's Messages API as a chat: blocks become messages, tools functions, thinking a switch.

The functions raise InvalidRequestError for what no chat can say; ``param`` names the field of the body.
"""

import json
from collections.abc import Mapping
from typing import Any

from nanoserve.core.errors import InvalidRequestError
from nanoserve.protocol.anthropic import CountTokensRequest, MessagesRequest
from nanoserve.protocol.openai import ChatCompletionRequest, SamplingBody

Message = dict[str, Any]

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountTokensRequest) -> ChatCompletionRequest:
    """The chat that a body asks for.

    As with Anthropic, thoughts come only where ``thinking`` asks for them (``chat_template_kwargs`` may say otherwise),
    and a last message of the assistant is continued.
    """
    messages = _system(body.system)
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    if continues and messages[-1].get("tool_calls"):
        raise _bad("The last message calls a tool; `messages` must go on with its `tool_result`.", "messages")
    sampling = {name: getattr(body, name) for name in SamplingBody.model_fields}
    return ChatCompletionRequest(
        **sampling,
        messages=messages,
        **_limits(body),
        **_tools(body),
        **_thinking(body.thinking),
        **_output(body),
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=continues or None,
    )


def _bad(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)


def _limits(body: CountTokensRequest) -> Message:
    if not isinstance(body, MessagesRequest):
        return {}
    return {"max_tokens": body.max_tokens, "stop": body.stop_sequences}


def _system(system: str | list[Any] | None) -> list[Message]:
    if not system:
        return []
    return [{"role": "system", "content": _text(system, "system", "system")}]


def _messages(message: Mapping[str, Any], where: str) -> list[Message]:
    """One message of Anthropic's as chat messages: each tool result is one of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise _bad(f"`{where}.role` must be user or assistant. Given: {role!r:.100}.", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _bad(f"`{where}.content` must be text or a list of blocks. Given: {content!r:.100}.", "messages")
    blocks = [_block(block, f"{where}.content[{index}]") for index, block in enumerate(content)]
    return [_assistant(blocks, where)] if role == "assistant" else _turns(blocks, str(role), where)


def _block(block: object, where: str) -> Mapping[str, Any]:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise _bad(f"`{where}` must be an object with a `type`. Given: {block!r:.100}.", "messages")
    return block


def _assistant(blocks: list[Mapping[str, Any]], where: str) -> Message:
    content, thoughts, calls = "", "", []
    for index, block in enumerate(blocks):
        kind, place = block["type"], f"{where}.content[{index}]"
        if kind == "tool_use":
            calls.append(_tool_use(block, place))
        elif kind == "thinking":
            thoughts += _string(block, "thinking", place)
        elif kind != "redacted_thinking":
            content += _text([block], place, "messages")
    message: Message = {"role": "assistant", "content": content}
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _tool_use(block: Mapping[str, Any], where: str) -> Message:
    name, arguments = _string(block, "name", where), block.get("input")
    if not isinstance(arguments, dict):
        raise _bad(f"`{where}.input` must be an object. Given: {arguments!r:.100}.", "messages")
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


def _turns(blocks: list[Mapping[str, Any]], role: str, where: str) -> list[Message]:
    """Texts that follow each other are one message."""
    turns: list[Message] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block["type"] == "tool_result":
            result = _text(block.get("content") or "", f"{place}.content", "messages")
            turns.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            continue
        text = _text([block], place, "messages")
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += text
        else:
            turns.append({"role": role, "content": text})
    return turns or [{"role": role, "content": ""}]


def _text(content: object, where: str, param: str) -> str:
    """The text of a string or of text blocks, joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"`{where}` must be text or a list of text blocks. Given: {content!r:.100}.", param)
    return "".join(_text_of_block(block, where, param) for block in content)


def _text_of_block(block: object, where: str, param: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text" or not isinstance(block, dict):
        raise _bad(f"`{where}` must hold text: this model takes text only. Given: type {kind!r:.60}.", param)
    return _string(block, "text", where, param)


def _string(block: Mapping[str, Any], name: str, where: str, param: str = "messages") -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _bad(f"`{where}.{name}` must be a string. Given: {value!r:.100}.", param)
    return value


def _tools(body: CountTokensRequest) -> Message:
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    choice = body.tool_choice or {}
    fields: Message = {"tools": tools or None, "tool_choice": _tool_choice(choice) if choice else None}
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: Mapping[str, Any], where: str) -> Message:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise _bad(f"`{where}` is of type {kind!r:.60}, which this server does not have; use `input_schema`.", "tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise _bad(f"`{where}.input_schema` must be a JSON schema object.", "tools")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    optional = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | optional}


def _tool_choice(choice: Mapping[str, Any]) -> str | Message:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise _bad(f"`tool_choice.type` must be auto, any, tool or none. Given: {kind!r:.60}.", "tool_choice")
    return _TOOL_CHOICES[kind]


def _thinking(thinking: Mapping[str, Any] | None) -> Message:
    kind = "disabled" if thinking is None else thinking.get("type")
    if thinking is None or kind == "disabled":
        return {"enable_thinking": False}
    if kind == "adaptive":
        return {"enable_thinking": True}
    budget = thinking.get("budget_tokens")
    if kind != "enabled" or not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        message = "`thinking` must be of type enabled (with `budget_tokens` >= 1), adaptive or disabled."
        raise _bad(f"{message} Given: {dict(thinking)!r:.100}.", "thinking")
    return {"enable_thinking": True, "thinking_token_budget": budget}


def _output(body: CountTokensRequest) -> Message:
    """The form of the answer (``output_config.format``, or ``output_format`` as it was first called) and the effort."""
    config = body.output_config or {}
    effort, form = config.get("effort"), config.get("format") or body.output_format
    fields: Message = {"reasoning_effort": effort if isinstance(effort, str) and body.thinking else None}
    if form is None:
        return fields
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise _bad("`output_config.format` must be of type json_schema with a `schema`.", "output_config")
    wrapped = {"name": "answer", "schema": form["schema"]}
    return fields | {"response_format": {"type": "json_schema", "json_schema": wrapped}}
