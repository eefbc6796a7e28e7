"""The model's own chat template, rendered so that only the template writes control tokens.

Whatever users typed (content, tool results, tool schemas, template arguments) is marked before rendering and stays
plain text; the template comes from the checkpoint and runs in transformers' sandboxed jinja environment.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from nanoserve.core.errors import InvalidRequestError
from nanoserve.text.messages import normalise
from nanoserve.text.policy import Thinking, ToolStyle
from nanoserve.text.tokenizer import Tokenizer

# Arguments of the rendering call itself: a client may neither replace the template nor ask for tensors.
_RESERVED = frozenset((
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
    "return_assistant_tokens_mask", "sanitize_control_tokens",
))  # fmt: skip
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template is asked to render, as the client sent it. ``kwargs``: the template's own arguments."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the model reads it; ``thinking`` says what the template did about thoughts."""

    text: str
    token_ids: tuple[int, ...]
    thinking: Thinking


class ChatTemplate:
    """The template of one model; stateless."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.pretrained.chat_template
        self.exists = bool(template)
        self.tool_style = ToolStyle.XML if "<function=" in str(template) else ToolStyle.HERMES
        # Where a template does not ask, it walks the arguments as a mapping.
        self._takes_argument_text = "arguments is string" in str(template)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        """The prompt of a conversation.

        Raises:
            InvalidRequestError: there is no template, the conversation is malformed, or the template refuses it.
        """
        marked = self._rendered(conversation)
        text = self._tokenizer.unmark(marked)
        return RenderedPrompt(text, tuple(self._tokenizer.encode_marked(marked)), self._thinking(marked, conversation))

    def _rendered(self, conversation: Conversation) -> str:
        if not self.exists:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
        _check_kwargs(conversation)
        messages = self._marked(self._arguments(normalise(conversation.messages)))
        try:
            return str(
                self._tokenizer.pretrained.apply_chat_template(
                    messages,
                    tools=self._marked(list(conversation.tools)) or None,
                    tokenize=False,
                    add_generation_prompt=conversation.add_generation_prompt,
                    continue_final_message=conversation.continue_final_message,
                    **{key: self._marked(value) for key, value in conversation.kwargs.items()},
                )
            )
        except _TEMPLATE_FAULTS as error:
            reason = self._tokenizer.unmark(str(error)).split("\n")[0][:300] or type(error).__name__
            raise InvalidRequestError(f"The chat template refuses this: {reason}", param="messages") from None

    def _arguments(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self._takes_argument_text:
            for message in messages:
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return messages

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._tokenizer.mark(value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item) for item in value]
        return value

    def _thinking(self, marked: str, conversation: Conversation) -> Thinking:
        """From the template's own tags in the turn to be written; the users' are marked and do not count."""
        turn = self._tokenizer.last_turn(marked)
        if turn.rfind("<think>") > turn.rfind("</think>"):
            return Thinking.OPEN
        closed = "</think>" in turn or conversation.continue_final_message
        return Thinking.OFF if closed or conversation.kwargs.get("enable_thinking") is False else Thinking.AUTO


def _check_kwargs(conversation: Conversation) -> None:
    param = "chat_template_kwargs"
    if taken := sorted(_RESERVED & conversation.kwargs.keys()):
        raise InvalidRequestError(f"`{param}` must not hold `{taken[0]}`.", param=param)
    if conversation.continue_final_message:
        if conversation.add_generation_prompt:
            raise InvalidRequestError(
                "`continue_final_message` and `add_generation_prompt` exclude each other.",
                param="continue_final_message",
            )
        if conversation.messages and conversation.messages[-1].get("role") != "assistant":
            raise InvalidRequestError(
                "`continue_final_message` needs an assistant message at the end.", param="continue_final_message"
            )
