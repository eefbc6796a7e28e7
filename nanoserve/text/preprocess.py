"""From a request body to requests for an engine: words to tokens, and every limit judged at the door."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.request import GenerateRequest, Grammar
from nanoserve.core.sampling import MAX_LOGPROBS, SamplingParams
from nanoserve.protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    RequestBody,
    TokenizeRequest,
)
from nanoserve.text.chat_template import ChatTemplate, Conversation
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.grammar import grammar_text, tool_call_grammar, whole_answer
from nanoserve.text.messages import check_tools, check_unicode, strings_in
from nanoserve.text.policy import OutputPolicy, Thinking
from nanoserve.text.structured import answer_form
from nanoserve.text.tokenizer import Tokenizer
from nanoserve.text.tool_choice import ToolUse, tool_use

__all__ = ["ModelLimits", "OutputPolicy", "PreparedRequest", "Preprocessor"]

MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16
_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "prompt_logprobs",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Counts that bound a request: positions, embedding rows, and tokens that the KV pool can hold."""

    max_model_len: int
    vocab_size: int
    max_kv_tokens: int

    @property
    def max_tokens(self) -> int:
        """The most tokens, prompt and answer together, that one request can have."""
        return min(self.max_model_len, self.max_kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """One prompt, ready to run: ``choices`` are its ``n`` requests, ids ``f"{request_id}-{index}"``, seeds set.

    The index counts the choices of all prompts of a body, prompt by prompt. ``prompt_text``: the prompt as text, None
    for a token-id prompt that nobody wants to read.
    """

    choices: tuple[GenerateRequest, ...]
    prompt_text: str | None
    prompt_token_ids: tuple[int, ...]
    policy: OutputPolicy

    @property
    def seed(self) -> int:
        """The seed of the first choice, given or drawn: sent again, it brings the same answer."""
        seed = self.choices[0].sampling.seed
        assert seed is not None
        return seed


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where a prompt came from: ``param`` is what errors name, ``first_index`` the number of its first choice."""

    request_id: str
    param: str
    first_index: int = 0
    priority: int = 0
    cache_salt: str = ""


class Preprocessor:
    """One model's door. Stateless; ``reasoning`` off leaves the tags of thoughts in the content.

    The methods raise InvalidRequestError for whatever can never work, with ``param`` naming the field. They tokenize,
    so a long prompt takes milliseconds (about 0.7 s a million characters).
    """

    def __init__(
        self, tokenizer: Tokenizer, limits: ModelLimits, defaults: GenerationDefaults, *, reasoning: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._limits = limits
        self._defaults = defaults
        self._reasoning = reasoning

    def chat(self, body: ChatCompletionRequest, request_id: str) -> PreparedRequest:
        """The engine requests of a chat. Without ``max_tokens`` the answer may fill the context."""
        _check_common(body)
        _check_media(body)
        tools = tool_use(body)
        num_top = _chat_logprobs(body)
        params = self._params(body, _chat_max_tokens(body, self._defaults.max_new_tokens), num_top)
        if params.max_tokens == 0:
            raise InvalidRequestError("`max_tokens` must be >= 1. Given: 0.", param="max_tokens")
        self._check_chars(body.messages, "messages")
        rendered = self._template.render(_conversation(body, tools))
        split = self._reasoning and body.separate_reasoning is not False
        policy = _policy(
            params,
            thinking=rendered.thinking if split else Thinking.OFF,
            parse_tools=bool(tools.offered),
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        prompt = _Prompt(rendered.text, rendered.token_ids)
        grammar = self._grammar(body, rendered.thinking, tools)
        return self._prepared(prompt, params, policy, grammar, _origin(body, request_id, "messages"))

    def completion(self, body: CompletionRequest, request_id: str) -> list[PreparedRequest]:
        """The engine requests of each prompt, in order. Names of special tokens in a text prompt are these tokens."""
        _check_common(body)
        _check_completion(body)
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        params = self._params(body, max_tokens, body.logprobs)
        if params.max_tokens == 0 and not (body.echo or params.prompt_logprobs is not None):
            raise InvalidRequestError(
                "`max_tokens` must be >= 1 (0 only with `echo` or `prompt_logprobs`). Given: 0.", param="max_tokens"
            )
        grammar = self._grammar(body, Thinking.OFF, ToolUse((), ()))
        prepared = []
        for number, prompt in enumerate(self._prompts(body)):
            policy = _policy(params, echo=bool(body.echo), prompt_text=self._echo_text(body, prompt))
            origin = _origin(body, request_id, "prompt", first_index=number * params.n)
            prepared.append(self._prepared(prompt, params, policy, grammar, origin))
        return prepared

    def prompt(self, prompt: str | list[int], params: SamplingParams, request_id: str) -> PreparedRequest:
        """One prompt of an offline caller, whose settings are taken as they are: no defaults of the model."""
        self._check_params(params)
        checked = self._prompt(prompt)
        grammar = self._spec_grammar(params, Thinking.OFF)
        return self._prepared(checked, params, _policy(params), grammar, _Origin(request_id=request_id, param="prompt"))

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        request_id: str,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        split: bool = True,
    ) -> PreparedRequest:
        """One conversation of an offline caller. ``split`` tells thoughts and tool calls from the content."""
        self._check_params(params)
        self._check_chars(messages, "messages")
        conversation = Conversation(
            messages=list(messages),
            tools=check_tools(None if tools is None else list(tools)),
            kwargs=dict(chat_template_kwargs or {}),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        )
        rendered = self._template.render(conversation)
        thinking = rendered.thinking if split else Thinking.OFF
        policy = _policy(params, thinking=thinking, parse_tools=split and bool(tools))
        grammar = self._spec_grammar(params, rendered.thinking)
        origin = _Origin(request_id=request_id, param="messages")
        return self._prepared(_Prompt(rendered.text, rendered.token_ids), params, policy, grammar, origin)

    def tokenize(self, body: TokenizeRequest) -> tuple[int, ...]:
        """The ids of a text (special tokens parsed, as in completions) or of a conversation (as in a chat)."""
        _check_unicode(body)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("Exactly one of `prompt` and `messages` must be given.", param="prompt")
        if body.messages is None:
            return tuple(self._tokenizer.encode(body.prompt or "", allow_special=True))
        kwargs = _template_kwargs(body.chat_template_kwargs, body.enable_thinking)
        conversation = Conversation(
            messages=body.messages,
            tools=check_tools(body.tools),
            kwargs=kwargs,
            add_generation_prompt=_wants_generation_prompt(body),
            continue_final_message=bool(body.continue_final_message),
        )
        return self._template.render(conversation).token_ids

    def detokenize(self, body: DetokenizeRequest) -> str:
        """The text of ids of the vocabulary, special tokens shown unless asked otherwise."""
        ids = self._checked_ids(body.tokens, "tokens")
        return self._tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens))

    # Settings

    def _params(self, body: GenerationBody, max_tokens: int | None, num_top: int | None) -> SamplingParams:
        """The request's settings over the model's defaults, still with stop strings and without a seed."""
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
        stop = [text for text in body.stop if text is not None] if isinstance(body.stop, list) else body.stop
        params = SamplingParams(
            **(dict(self._defaults.sampling) | given),
            stop=stop,
            logit_bias=self._logit_bias(body.logit_bias),
            max_tokens=max_tokens,
            logprobs=num_top,
        )
        self._check_params(params)
        return params

    def _check_params(self, params: SamplingParams) -> None:
        """Refuse what names a token that the model does not have."""
        check_unicode(list(params.stop or ()), "stop")
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                self._check_id(token_id, name)

    def _logit_bias(self, bias: Mapping[str, float] | None) -> dict[int, float] | None:
        for key in bias or ():
            if not (key.isascii() and key.isdigit() and len(key) < 12):
                raise InvalidRequestError(
                    f"`logit_bias` keys must be token ids. Given: {key!r:.100}.", param="logit_bias"
                )
            self._check_id(int(key), "logit_bias")
        return {int(key): value for key, value in (bias or {}).items()} or None

    def _check_id(self, token_id: object, param: str) -> None:
        fine = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not fine or not 0 <= token_id < self._limits.vocab_size:  # type: ignore[operator]
            raise InvalidRequestError(
                f"`{param}` must hold token ids in [0, {self._limits.vocab_size - 1}]. Given: {token_id!r:.100}.",
                param=param,
            )

    def _checked_ids(self, token_ids: Sequence[Any], param: str) -> tuple[int, ...]:
        for token_id in token_ids:
            self._check_id(token_id, param)
        return tuple(token_ids)

    def _grammar(self, body: GenerationBody, thinking: Thinking, tools: ToolUse) -> Grammar | None:
        """What the answer must look like: a forced call, or the form asked for (or a call, where tools are offered)."""
        form = answer_form(body)
        if tools.forced:
            forms = [self._call_grammar(tools.forced)]
        elif form is None:
            return None
        else:
            spec, param = form
            forms = [grammar_text(spec, param=param)]
            forms += [self._call_grammar(tools.offered)] if tools.offered else []
        if self._tokenizer.id_of("</think>") is None:
            thinking = Thinking.OFF
        return Grammar(whole_answer(forms, thinking), self._defaults.eos_token_ids)

    def _spec_grammar(self, params: SamplingParams, thinking: Thinking) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        if self._tokenizer.id_of("</think>") is None:
            thinking = Thinking.OFF
        text = whole_answer([grammar_text(params.structured_outputs)], thinking)
        return Grammar(text, self._defaults.eos_token_ids)

    def _call_grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        tag_tokens = self._tokenizer.id_of("<tool_call>") is not None
        return tool_call_grammar([tool["function"] for tool in tools], tag_tokens=tag_tokens)

    # Prompts

    def _prompts(self, body: CompletionRequest) -> list[_Prompt]:
        prompt = body.prompt
        many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        prompts = prompt if many else [prompt]
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"`prompt` may hold {MAX_PROMPTS} prompts at most. Given: {len(prompts)}.", param="prompt"
            )
        return [self._prompt(item) for item in prompts]

    def _prompt(self, prompt: object) -> _Prompt:
        if not isinstance(prompt, str | list):
            raise InvalidRequestError(
                f"`prompt` must be a text, token ids, or a list of either. Given: {prompt!r:.100}.", param="prompt"
            )
        if not prompt:
            raise InvalidRequestError("`prompt` must not be empty.", param="prompt")
        if isinstance(prompt, list):
            self._check_length(len(prompt), "prompt", max_tokens=0)
            return _Prompt(None, self._checked_ids(prompt, "prompt"))
        self._check_chars(prompt, "prompt")
        return _Prompt(prompt, tuple(self._tokenizer.encode(prompt, allow_special=True)))

    def _echo_text(self, body: CompletionRequest, prompt: _Prompt) -> str:
        """The text that precedes the answer; decoded where offsets into it are wanted, for ``encode`` normalises."""
        if not body.echo:
            return ""
        if prompt.text is not None and body.logprobs is None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _check_chars(self, value: object, param: str) -> None:
        """Refuse what cannot fit before it is tokenized. NFC shrinks a text to a third at most."""
        num_chars = sum(len(text) for text in strings_in(value))
        least = num_chars // (3 * self._tokenizer.max_token_bytes)
        if least > self._limits.max_tokens:
            raise self._too_long(f"at least {least}", param)

    def _check_length(self, num_tokens: int, param: str, *, max_tokens: int | None) -> None:
        if num_tokens + (max_tokens != 0) > self._limits.max_tokens:
            raise self._too_long(str(num_tokens), param)

    def _too_long(self, num_tokens: str, param: str) -> InvalidRequestError:
        limits = self._limits
        bound = (
            f"the model's context holds {limits.max_model_len} tokens"
            if limits.max_model_len <= limits.max_kv_tokens
            else f"the KV cache holds {limits.max_kv_tokens} tokens"
        )
        return InvalidRequestError(
            f"The prompt has {num_tokens} tokens, but {bound}, prompt and at least one token of answer together.",
            param=param,
            code="context_length_exceeded",
        )

    # Requests

    def _prepared(
        self,
        prompt: _Prompt,
        params: SamplingParams,
        policy: OutputPolicy,
        grammar: Grammar | None,
        origin: "_Origin",
    ) -> PreparedRequest:
        param = origin.param
        if not prompt.token_ids:
            raise InvalidRequestError(f"`{param}` must not be empty.", param=param)
        num_prompt = len(prompt.token_ids)
        self._check_length(num_prompt, param, max_tokens=params.max_tokens)
        room = self._limits.max_tokens - num_prompt
        resolved = replace(
            params,
            n=1,
            stop=None,
            structured_outputs=None,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            prompt_logprobs=params.logprobs
            if policy.scores_prompt and params.prompt_logprobs is None
            else params.prompt_logprobs,
            stop_token_ids=self._stop_ids(params),
        )
        choices = tuple(
            GenerateRequest(
                request_id=f"{origin.request_id}-{origin.first_index + index}",
                prompt_token_ids=prompt.token_ids,
                sampling=replace(resolved, seed=seed),
                grammar=grammar,
                priority=origin.priority,
                arrival_s=time.time(),
                cache_salt=origin.cache_salt,
            )
            for index, seed in enumerate(_seeds(params.seed, params.n))
        )
        return PreparedRequest(
            choices=choices, prompt_text=prompt.text, prompt_token_ids=prompt.token_ids, policy=policy
        )

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self._defaults.eos_token_ids
        return tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))


def _origin(body: GenerationBody, request_id: str, param: str, *, first_index: int = 0) -> _Origin:
    return _Origin(
        request_id=request_id,
        param=param,
        first_index=first_index,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def _policy(params: SamplingParams, **fields: Any) -> OutputPolicy:
    return OutputPolicy(
        stop=tuple(params.stop or ()),
        include_stop_str_in_output=params.include_stop_str_in_output,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        skip_special_tokens=params.skip_special_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        **fields,
    )


def _seeds(seed: int | None, num_choices: int) -> list[int]:
    """Seeds of the choices: the first has the request's own, so it is what ``n=1`` gives; the rest are derived."""
    first = secrets.randbits(63) if seed is None else seed
    return [first, *(_derived(first, index) for index in range(1, num_choices))]


def _derived(seed: int, index: int) -> int:
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _conversation(body: ChatCompletionRequest, tools: ToolUse) -> Conversation:
    kwargs = _template_kwargs(body.chat_template_kwargs, body.enable_thinking, body.reasoning_effort)
    return Conversation(
        messages=body.messages,
        tools=tools.offered,
        kwargs=kwargs,
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
    if enable_thinking is None and effort == "none":
        enable_thinking = False
    common = {"enable_thinking": enable_thinking, "reasoning_effort": effort}
    return {name: value for name, value in common.items() if value is not None} | dict(kwargs or {})


def _check_common(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("`stream_options` needs `stream`: true.", param="stream_options")
    _check_unicode(body)


def _check_unicode(body: RequestBody) -> None:
    for name, value in body:
        check_unicode(value, name)


def _check_media(body: ChatCompletionRequest) -> None:
    if body.modalities and body.modalities != ["text"]:
        raise InvalidRequestError('`modalities` can only be ["text"]: this model writes text.', param="modalities")


def _check_completion(body: CompletionRequest) -> None:
    if body.suffix:
        raise InvalidRequestError("`suffix` is not supported by this model.", param="suffix")
    if body.best_of not in (None, 1, body.n or 1):
        raise InvalidRequestError(f"`best_of` must equal `n`. Given: {body.best_of}.", param="best_of")


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    num_top = body.top_logprobs
    if num_top is not None and not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"`top_logprobs` must be an integer in [0, {MAX_LOGPROBS}]. Given: {num_top}.", param="top_logprobs"
        )
    if num_top and not body.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs`: true.", param="top_logprobs")
    return (num_top or 0) if body.logprobs else None


def _chat_max_tokens(body: ChatCompletionRequest, default: int | None) -> int | None:
    """``max_completion_tokens`` succeeded ``max_tokens`` in OpenAI's API and wins where both are given."""
    if body.max_completion_tokens is not None:
        if not 1 <= body.max_completion_tokens < 2**31:
            raise InvalidRequestError(
                f"`max_completion_tokens` must be an integer >= 1. Given: {body.max_completion_tokens}.",
                param="max_completion_tokens",
            )
        return body.max_completion_tokens
    return default if body.max_tokens is None else body.max_tokens
