"""Prompts as tokens, checked against what the model and its KV pool can hold."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.core.errors import InvalidRequestError
from nanoserve.text.messages import check_unicode, strings_in
from nanoserve.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024


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


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that they came from."""

    text: str | None
    token_ids: tuple[int, ...]


class PromptReader:
    """Reads prompts for one model; stateless. The methods raise InvalidRequestError, ``param`` naming the field."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def all(self, prompt: str | list[Any]) -> list[Prompt]:
        """The prompts of a completion: a text, token ids, or a list of either."""
        many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        prompts = prompt if many else [prompt]
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"`prompt` may hold {MAX_PROMPTS} prompts at most. Given: {len(prompts)}.", param="prompt"
            )
        return [self.one(item) for item in prompts]

    def one(self, prompt: object) -> Prompt:
        """A single prompt. Names of special tokens in a text are these tokens."""
        if not isinstance(prompt, str | list):
            raise InvalidRequestError(
                f"`prompt` must be a text, token ids, or a list of either. Given: {prompt!r:.100}.", param="prompt"
            )
        if not prompt:
            raise InvalidRequestError("`prompt` must not be empty.", param="prompt")
        if isinstance(prompt, list):
            self.check_length(len(prompt), "prompt", max_tokens=0)
            return Prompt(None, self.checked_ids(prompt, "prompt"))
        check_unicode(prompt, "prompt")
        self.check_chars(prompt, "prompt")
        return Prompt(prompt, tuple(self._tokenizer.encode(prompt, allow_special=True)))

    def check_id(self, token_id: object, param: str) -> None:
        """Refuse what is no row of the embedding."""
        fine = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not fine or not 0 <= token_id < self._limits.vocab_size:  # type: ignore[operator]
            raise InvalidRequestError(
                f"`{param}` must hold token ids in [0, {self._limits.vocab_size - 1}]. Given: {token_id!r:.100}.",
                param=param,
            )

    def checked_ids(self, token_ids: Sequence[Any], param: str) -> tuple[int, ...]:
        for token_id in token_ids:
            self.check_id(token_id, param)
        return tuple(token_ids)

    def check_chars(self, value: object, param: str) -> None:
        """Refuse what cannot fit before it is tokenized. NFC shrinks a text to a third at most."""
        chars_per_token = 3 * self._tokenizer.max_token_bytes
        if len(json.dumps(value, ensure_ascii=False, default=repr)) <= chars_per_token * self._limits.max_tokens:
            return
        least = sum(len(text) for text in strings_in(value)) // chars_per_token
        if least > self._limits.max_tokens:
            raise self._too_long(f"at least {least}", param)

    def check_conversation(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
        """The same of a conversation, of which every message has a token of its own at least."""
        if len(messages) > self._limits.max_tokens:
            raise self._too_long(f"at least {len(messages)}", "messages")
        self.check_chars([messages, tools], "messages")

    def check_length(self, num_tokens: int, param: str, *, max_tokens: int | None) -> None:
        """Refuse a prompt that leaves no room for a token of answer, where one is wanted."""
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
