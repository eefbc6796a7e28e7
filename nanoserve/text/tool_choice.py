"""Which tools a chat may or must use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.core.errors import InvalidRequestError
from nanoserve.protocol.openai import ChatCompletionRequest
from nanoserve.text.messages import check_tools, function_names


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``offered``: the tools that the model is told of. ``forced``: it must call one of these; () leaves it free."""

    offered: tuple[Mapping[str, Any], ...]
    forced: tuple[Mapping[str, Any], ...]


def tool_use(body: ChatCompletionRequest) -> ToolUse:
    """The tools of a chat. ``"none"`` offers none; without a choice it is "auto".

    Raises:
        InvalidRequestError: a tool is malformed, or the choice names a tool that is not there.
    """
    tools, choice = check_tools(body.tools), body.tool_choice
    if choice in (None, "auto"):
        return ToolUse(tools, ())
    if choice == "none":
        return ToolUse((), ())
    if choice != "required" and not isinstance(choice, dict):
        raise _bad(f"`tool_choice` must be none, auto, required or a function. Given: {choice!r:.100}.")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(tools, choice)
    if not tools:
        raise _bad("`tool_choice` asks for a tool call, but `tools` holds no tool.")
    return ToolUse(tools, tools if choice == "required" else _named(tools, choice))


def _allowed(tools: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]) -> ToolUse:
    """``{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}``: the others are not offered at all."""
    allowed = choice.get("allowed_tools")
    mode, named = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise _bad("`tool_choice.allowed_tools` must have a `mode` (auto or required) and a list of `tools`.")
    offered = tuple(dict.fromkeys(_index_of(tools, name) for name in named))
    chosen = tuple(tools[index] for index in offered)
    return ToolUse(chosen, chosen if mode == "required" else ())


def _index_of(tools: Sequence[Mapping[str, Any]], choice: object) -> int:
    (tool,) = _named(tools, choice)[:1]
    return next(index for index, other in enumerate(tools) if other is tool)


def _named(tools: Sequence[Mapping[str, Any]], choice: object) -> tuple[Mapping[str, Any], ...]:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    named = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if not named:
        known = ", ".join(function_names(tools))[:200]
        raise _bad(f"`tool_choice` must name one of the functions in `tools` ({known}). Given: {name!r:.100}.")
    return named


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tool_choice")
