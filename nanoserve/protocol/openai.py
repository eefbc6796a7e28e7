"""OpenAI's request bodies, as clients send them, with vLLM's extensions.

Known fields are strictly typed (a bool is no number, a string is no integer); unknown fields are ignored, because real
clients send many. Ranges are judged once, by ``core.sampling``; what depends on the model by ``text.preprocess``.
``fail_fast``: a list stops at its first wrong item, for a report on a million of them would take longer than an answer.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class RequestBody(BaseModel):
    """A JSON object of which unknown members are ignored. ``null`` means that a field was left out."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream carries besides the answer: usage in a last chunk, or in every chunk."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(RequestBody):
    """How tokens are chosen, on every route that generates."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[Any] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class GenerationBody(SamplingBody):
    """What chat and text completions have in common."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[Any] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, fail_fast=True)
    guided_grammar: str | None = None
    user: Any = None
    chat_template: Any = None
    use_beam_search: Any = None


class ChatCompletionRequest(GenerationBody):
    """The body of ``POST /v1/chat/completions``. Messages and tools are read by ``text.messages``."""

    messages: list[dict[str, Any]] = Field(fail_fast=True)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    thinking: dict[str, Any] | None = None
    modalities: list[str] | None = Field(default=None, fail_fast=True)
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None
    functions: Any = None


class CompletionRequest(GenerationBody):
    """The body of ``POST /v1/completions``. ``prompt``: a text, token ids, or a list of either."""

    prompt: str | list[Any]
    suffix: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_embeds: Any = None


class TokenizeRequest(RequestBody):
    """The body of ``POST /tokenize``: a text (``prompt``) or a conversation (``messages``)."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    tools: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None


class DetokenizeRequest(RequestBody):
    """The body of ``POST /detokenize``."""

    tokens: list[Any] = Field(...)
    skip_special_tokens: bool | None = None
