"""From a request body to requests for an engine: words to tokens, and every limit judged at the door."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random, SystemRandom
from typing import Any

from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.request import GenerateRequest, Grammar, ThinkingBudget
from nanoserve.core.sampling import SamplingParams
from nanoserve.protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    TokenizeRequest,
)
from nanoserve.text.chat_template import ChatTemplate, Conversation
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.grammar import grammar_text, strict_calls, tool_call_grammar, whole_answer, xml_call_grammar
from nanoserve.text.messages import check_tools, check_unicode
from nanoserve.text.policy import OutputPolicy, Thinking, ToolStyle
from nanoserve.text.prompts import ModelLimits, Prompt, PromptReader
from nanoserve.text.request_fields import (
    chat_conversation,
    chat_logprobs,
    chat_max_tokens,
    check_common,
    check_completion,
    check_media,
    check_text,
    thinking_budget,
    tokenized_conversation,
)
from nanoserve.text.structured import answer_form
from nanoserve.text.tokenizer import Tokenizer
from nanoserve.text.tool_choice import ToolUse, tool_use
from nanoserve.text.xml_calls import parameter_schemas

__all__ = ["ModelLimits", "OutputPolicy", "PreparedRequest", "Preprocessor"]

MAX_CHOICES = 2048  # of one request: each is a request of its own to an engine
DEFAULT_COMPLETION_TOKENS = 16
_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "prompt_logprobs",
)  # fmt: skip


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

    def thinking_for(self, budget: ThinkingBudget | None) -> "PreparedRequest":
        """The same with a bound for the thoughts of each choice."""
        if budget is None:
            return self
        return replace(self, choices=tuple(replace(choice, thinking=budget) for choice in self.choices))

    @property
    def seed(self) -> int:
        """The seed of the first choice, given or drawn: sent again, it brings the same answer."""
        seed = self.choices[0].sampling.seed
        assert seed is not None
        return seed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where a prompt came from: ``param`` is what errors name, ``first_index`` the number of its first choice."""

    request_id: str
    param: str
    first_index: int = 0
    priority: int = 0
    cache_salt: str = ""
    session_id: str = ""


class Preprocessor:
    """One model's door. ``reasoning`` off leaves the tags of thoughts in the content. Requests without a seed draw one;
    with ``seed`` the draws repeat from start to start, so the same requests in the same order get the same answers.
    With ``generates`` off every request for an answer is refused.

    The methods raise InvalidRequestError for whatever can never work, with ``param`` naming the field. They tokenize,
    so a long prompt takes milliseconds (about 0.7 s a million characters).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        defaults: GenerationDefaults,
        *,
        reasoning: bool = True,
        generates: bool = True,
        seed: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._limits = limits
        self._reader = PromptReader(tokenizer, limits)
        self._defaults = defaults
        self._reasoning = reasoning
        self._random = SystemRandom() if seed is None else Random(seed)
        self._generates = generates

    def chat(self, body: ChatCompletionRequest, request_id: str) -> PreparedRequest:
        """The engine requests of a chat. Without ``max_tokens`` the answer may fill the context."""
        check_common(body)
        check_media(body)
        tools = tool_use(body)
        num_top = chat_logprobs(body)
        params = self._params(body, chat_max_tokens(body, self._defaults.max_new_tokens), num_top)
        if params.max_tokens == 0:
            raise InvalidRequestError("`max_tokens` must be >= 1. Given: 0.", param="max_tokens")
        self._reader.check_conversation(body.messages, body.tools)
        rendered = self._template.render(chat_conversation(body, tools))
        split = self._reasoning and body.separate_reasoning is not False
        policy = _policy(
            params,
            thinking=rendered.thinking if split else Thinking.OFF,
            **self._tool_policy(tools.offered),
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        prompt = Prompt(rendered.text, rendered.token_ids)
        grammar = self._grammar(body, rendered.thinking, tools)
        prepared = self._prepared(prompt, params, policy, grammar, _origin(body, request_id, "messages"))
        return prepared.thinking_for(self._budget(thinking_budget(body), rendered.thinking))

    def completion(self, body: CompletionRequest, request_id: str) -> list[PreparedRequest]:
        """The engine requests of each prompt, in order. Names of special tokens in a text prompt are these tokens."""
        check_common(body)
        check_completion(body)
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        params = self._params(body, max_tokens, body.logprobs)
        if params.max_tokens == 0 and not (body.echo or params.prompt_logprobs is not None):
            raise InvalidRequestError(
                "`max_tokens` must be >= 1 (0 only with `echo` or `prompt_logprobs`). Given: 0.", param="max_tokens"
            )
        grammar = self._grammar(body, Thinking.OFF, ToolUse((), ()))
        prompts = self._reader.all(body.prompt)
        if (num_choices := len(prompts) * params.n) > MAX_CHOICES:
            raise InvalidRequestError(
                f"`n` times the number of prompts must be <= {MAX_CHOICES}. Given: {num_choices}.", param="n"
            )
        prepared = []
        for number, prompt in enumerate(prompts):
            policy = _policy(params, echo=bool(body.echo), prompt_text=self._echo_text(body, prompt))
            origin = _origin(body, request_id, "prompt", first_index=number * params.n)
            prepared.append(self._prepared(prompt, params, policy, grammar, origin))
        return prepared

    def prompt(self, prompt: str | list[int], params: SamplingParams, request_id: str) -> PreparedRequest:
        """One prompt of an offline caller, whose settings are taken as they are: no defaults of the model."""
        self._check_params(params)
        checked = self._reader.one(prompt)
        grammar = self._spec_grammar(params, Thinking.OFF)
        origin = _Origin(request_id=request_id, param="prompt")
        prepared = self._prepared(checked, params, _policy(params), grammar, origin)
        return prepared.thinking_for(self._budget(params.thinking_token_budget, Thinking.AUTO))

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
        check_unicode([messages, tools, chat_template_kwargs], "messages")
        self._reader.check_conversation(messages, tools)
        switch = {"enable_thinking": False} if params.thinking_token_budget == 0 else {}
        conversation = Conversation(
            messages=list(messages),
            tools=check_tools(None if tools is None else list(tools)),
            kwargs=switch | dict(chat_template_kwargs or {}),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        )
        rendered = self._template.render(conversation)
        thinking = rendered.thinking if split else Thinking.OFF
        policy = _policy(params, thinking=thinking, **self._tool_policy(conversation.tools if split else ()))
        grammar = self._spec_grammar(params, rendered.thinking)
        origin = _Origin(request_id=request_id, param="messages")
        prepared = self._prepared(Prompt(rendered.text, rendered.token_ids), params, policy, grammar, origin)
        return prepared.thinking_for(self._budget(params.thinking_token_budget, rendered.thinking))

    def count(self, body: ChatCompletionRequest) -> int:
        """How many tokens a chat's prompt has, whether it fits or not."""
        check_common(body)
        return len(self._template.render(chat_conversation(body, tool_use(body))).token_ids)

    def tokenize(self, body: TokenizeRequest) -> tuple[int, ...]:
        """The ids of a text (special tokens parsed, as in completions) or of a conversation (as in a chat)."""
        check_text(body)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("Exactly one of `prompt` and `messages` must be given.", param="prompt")
        if body.messages is None:
            around = body.add_special_tokens is not False
            return tuple(self._tokenizer.encode(body.prompt or "", allow_special=True, add_special_tokens=around))
        return self._template.render(tokenized_conversation(body)).token_ids

    def detokenize(self, body: DetokenizeRequest) -> str:
        """The text of ids of the vocabulary, special tokens shown unless asked otherwise."""
        ids = self._reader.checked_ids(body.tokens, "tokens")
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
                self._reader.check_id(token_id, name)

    def _logit_bias(self, bias: Mapping[str, float] | None) -> dict[int, float] | None:
        for key in bias or ():
            if not (key.isascii() and key.isdigit() and len(key) < 12):
                raise InvalidRequestError(
                    f"`logit_bias` keys must be token ids. Given: {key!r:.100}.", param="logit_bias"
                )
            self._reader.check_id(int(key), "logit_bias")
        return {int(key): value for key, value in (bias or {}).items()} or None

    def _grammar(self, body: GenerationBody, thinking: Thinking, tools: ToolUse) -> Grammar | None:
        """What the answer must look like: a forced call, or the form asked for (or a call, where tools are offered)."""
        form = answer_form(body)
        if tools.forced:
            forms = [self._call_grammar(tools.forced)]
        elif form is None:
            forms = self._strict_forms(tools.offered)
            if not forms:
                return None
        else:
            spec, param = form
            forms = [grammar_text(spec, param=param)]
            forms += [self._call_grammar(tools.offered)] if tools.offered else []
        if self._tokenizer.id_of("</think>") is None:
            thinking = Thinking.OFF
        return Grammar(whole_answer(forms, thinking), self._defaults.eos_token_ids)

    def _budget(self, num_tokens: int | None, thinking: Thinking) -> ThinkingBudget | None:
        if num_tokens is None or thinking is Thinking.OFF:
            return None
        open_id, close_id = self._tokenizer.id_of("<think>"), self._tokenizer.id_of("</think>")
        if open_id is None or close_id is None:
            return None
        return ThinkingBudget(num_tokens, close_id, None if thinking is Thinking.OPEN else open_id)

    def _spec_grammar(self, params: SamplingParams, thinking: Thinking) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        if self._tokenizer.id_of("</think>") is None:
            thinking = Thinking.OFF
        text = whole_answer([grammar_text(params.structured_outputs)], thinking)
        return Grammar(text, self._defaults.eos_token_ids)

    def _tool_policy(self, offered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not offered:
            return {}
        style = self._template.tool_style
        schemas = parameter_schemas(offered) if style is ToolStyle.XML else {}
        return {"parse_tools": True, "tool_style": style, "tool_schemas": schemas}

    def _call_grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        tag_tokens = self._tokenizer.id_of("<tool_call>") is not None
        grammar = xml_call_grammar if self._template.tool_style is ToolStyle.XML else tool_call_grammar
        return grammar([tool["function"] for tool in tools], tag_tokens=tag_tokens)

    def _strict_forms(self, offered: Sequence[Mapping[str, Any]]) -> list[str]:
        """Where a tool is strict, calls are bound though nobody forces one; that needs the tag to be a token."""
        is_strict = any(tool["function"].get("strict") for tool in offered)
        if not is_strict or self._tokenizer.id_of("<tool_call>") is None:
            return []
        return [strict_calls(self._call_grammar(offered))]

    def _echo_text(self, body: CompletionRequest, prompt: Prompt) -> str:
        """The text that precedes the answer; decoded where offsets into it are wanted, for ``encode`` normalises."""
        if not body.echo:
            return ""
        if prompt.text is not None and body.logprobs is None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    # Requests

    def _prepared(
        self,
        prompt: Prompt,
        params: SamplingParams,
        policy: OutputPolicy,
        grammar: Grammar | None,
        origin: "_Origin",
    ) -> PreparedRequest:
        param = origin.param
        if not self._generates:
            raise InvalidRequestError("This model writes no text; it makes embeddings or scores.", param="model")
        if not prompt.token_ids:
            raise InvalidRequestError(f"`{param}` must not be empty.", param=param)
        if grammar is not None and params.min_tokens:
            raise InvalidRequestError(
                "`min_tokens` cannot be combined with an answer of a given form, which ends when it is complete.",
                param="min_tokens",
            )
        num_prompt = len(prompt.token_ids)
        self._reader.check_length(num_prompt, param, max_tokens=params.max_tokens)
        room = self._limits.max_tokens - num_prompt
        resolved = replace(
            params,
            n=1,
            stop=None,
            structured_outputs=None,
            thinking_token_budget=None,
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
                session_id=origin.session_id,
            )
            for index, seed in enumerate(self._seeds(params.seed, params.n))
        )
        return PreparedRequest(
            choices=choices, prompt_text=prompt.text, prompt_token_ids=prompt.token_ids, policy=policy
        )

    def _seeds(self, seed: int | None, num_choices: int) -> list[int]:
        """Seeds of the choices: the first has the request's own, so it is what ``n=1`` gives; the rest are derived."""
        first = self._random.getrandbits(63) if seed is None else seed
        return [first, *(_derived(first, index) for index in range(1, num_choices))]

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
        session_id=body.session_id or "",
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


def _derived(seed: int, index: int) -> int:
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
