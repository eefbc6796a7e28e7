"""What the fields of a body mean together, before any model is asked.

The functions raise InvalidRequestError where the fields contradict each other; ``param`` names the field to change.
"""

from collections.abc import Mapping
from typing import Any

from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.sampling import MAX_LOGPROBS
from nanoserve.protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    RequestBody,
    TokenizeRequest,
)
from nanoserve.text.chat_template import Conversation
from nanoserve.text.messages import check_tools, check_unicode
from nanoserve.text.tool_choice import ToolUse

# The most tokens of thoughts for each `reasoning_effort`; None: as many as the model likes.
EFFORT_BUDGETS: Mapping[str, int | None] = {
    "none": 0, "minimal": 256, "low": 1024, "medium": 4096, "high": None, "xhigh": None, "max": None,
}  # fmt: skip

_NOT_SERVED: Mapping[str, str] = {
    "chat_template": "conversations are written in the model's own template",
    "functions": "offer functions as `tools`",
    "prompt_embeds": "send the prompt as text or token ids",
    "use_beam_search": "tokens are sampled",
}


def thinking_budget(body: ChatCompletionRequest) -> int | None:
    """The most tokens of thoughts; None: no bound. ``thinking_token_budget`` wins over the other two ways to say it."""
    effort = body.reasoning_effort
    if effort is not None and effort not in EFFORT_BUDGETS:
        raise InvalidRequestError(
            f"`reasoning_effort` must be one of {', '.join(EFFORT_BUDGETS)}. Given: {effort!r:.60}.",
            param="reasoning_effort",
        )
    param, budget = "thinking_token_budget", body.thinking_token_budget
    if budget is None:
        param, budget = "thinking", _anthropic_budget(body.thinking)
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        raise InvalidRequestError(f"`{param}` must be a number of tokens >= 0. Given: {budget!r:.60}.", param=param)
    return EFFORT_BUDGETS[effort] if budget is None and effort is not None else budget


def _anthropic_budget(thinking: Mapping[str, Any] | None) -> Any:
    """LiteLLM passes Anthropic's field on: ``{"type": "enabled", "budget_tokens": n}`` or ``{"type": "disabled"}``."""
    if thinking is None:
        return None
    return 0 if thinking.get("type") == "disabled" else thinking.get("budget_tokens")


def chat_conversation(body: ChatCompletionRequest, tools: ToolUse) -> Conversation:
    """What the template renders for a chat."""
    enable_thinking = body.enable_thinking
    if enable_thinking is None and thinking_budget(body) == 0:
        enable_thinking = False
    kwargs = _template_kwargs(body.chat_template_kwargs, enable_thinking, body.reasoning_effort)
    return Conversation(
        messages=body.messages,
        tools=tools.offered,
        kwargs=kwargs,
        add_generation_prompt=_wants_generation_prompt(body),
        continue_final_message=bool(body.continue_final_message),
    )


def tokenized_conversation(body: TokenizeRequest) -> Conversation:
    """What the template renders for a conversation to tokenize."""
    return Conversation(
        messages=body.messages or (),
        tools=check_tools(body.tools),
        kwargs=_template_kwargs(body.chat_template_kwargs, body.enable_thinking),
        add_generation_prompt=_wants_generation_prompt(body),
        continue_final_message=bool(body.continue_final_message),
    )


def _wants_generation_prompt(body: ChatCompletionRequest | TokenizeRequest) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt


def _template_kwargs(
    kwargs: Mapping[str, Any] | None, enable_thinking: bool | None, effort: str | None = None
) -> dict[str, Any]:
    """The template's arguments: ``chat_template_kwargs`` win over the fields that say the same for all models."""
    common = {"enable_thinking": enable_thinking, "reasoning_effort": effort}
    return {name: value for name, value in common.items() if value is not None} | dict(kwargs or {})


def check_common(body: GenerationBody) -> None:
    """Refuse what no kind of completion can have."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("`stream_options` needs `stream`: true.", param="stream_options")
    check_text(body)


def check_text(body: RequestBody) -> None:
    """Refuse halves of surrogate pairs in any field, and fields that would change the answer but are not served."""
    for name, value in body:
        if value and name in _NOT_SERVED:
            raise InvalidRequestError(f"`{name}` is not supported: {_NOT_SERVED[name]}.", param=name)
        check_unicode(value, name)


def check_media(body: ChatCompletionRequest) -> None:
    """Refuse answers other than text."""
    if body.modalities and body.modalities != ["text"]:
        raise InvalidRequestError('`modalities` can only be ["text"]: this model writes text.', param="modalities")


def check_completion(body: CompletionRequest) -> None:
    """Refuse what only other kinds of models offer."""
    if body.suffix:
        raise InvalidRequestError("`suffix` is not supported by this model.", param="suffix")
    if body.best_of not in (None, 1, body.n or 1):
        raise InvalidRequestError(f"`best_of` must equal `n`. Given: {body.best_of}.", param="best_of")


def chat_logprobs(body: ChatCompletionRequest) -> int | None:
    """The number of alternatives a token, None when log probabilities are not asked for."""
    num_top = body.top_logprobs
    if num_top is not None and not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"`top_logprobs` must be an integer in [0, {MAX_LOGPROBS}]. Given: {num_top}.", param="top_logprobs"
        )
    if num_top and not body.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs`: true.", param="top_logprobs")
    return (num_top or 0) if body.logprobs else None


def chat_max_tokens(body: ChatCompletionRequest, default: int | None) -> int | None:
    """``max_completion_tokens`` succeeded ``max_tokens`` in OpenAI's API and wins where both are given."""
    if body.max_completion_tokens is not None:
        if not 1 <= body.max_completion_tokens < 2**31:
            raise InvalidRequestError(
                f"`max_completion_tokens` must be an integer >= 1. Given: {body.max_completion_tokens}.",
                param="max_completion_tokens",
            )
        return body.max_completion_tokens
    return default if body.max_tokens is None else body.max_tokens
