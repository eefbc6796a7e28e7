"""How a request wants its tokens chosen: vLLM's field names, checked on construction, so always valid."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanoserve.core.errors import InvalidRequestError

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # of one stop string: so much of an answer may be held back
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 4096
MAX_N = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """A grammar that the output must match; exactly one field is set.

    ``json`` is a JSON schema as text, ``regex`` a regular expression, ``choice`` the allowed answers, ``grammar`` a
    Lark grammar, ``json_object`` any JSON object, ``tags`` free text in which some texts begin a form: (trigger, begin,
    JSON schema as text, end) each.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    tags: tuple[tuple[str, str, str, str], ...] | None = None

    def __post_init__(self) -> None:
        given = [self.json, self.regex, self.choice, self.grammar, self.json_object or None, self.tags]
        if sum(value is not None for value in given) != 1:
            raise InvalidRequestError(
                "`structured_outputs` must set one of json, regex, choice, grammar, json_object, structural_tag.",
                param="structured_outputs",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Immutable sampling settings of one request.

    ``top_k`` 0 or -1, ``top_p`` 1, ``min_p`` 0, penalties 0 (repetition 1) are off; ``temperature`` 0 is greedy.
    ``seed`` is taken modulo 2**64 from the signed or unsigned 64-bit range. ``max_tokens`` None means up to the
    context's end. ``logprobs`` counts alternatives beside the chosen token (0 gives only the chosen one), None is off.
    ``thinking_token_budget``: the most tokens of thoughts, after which they are ended and the answer goes on.

    Raises:
        InvalidRequestError: a value is out of range; ``param`` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        self._check_number("temperature", 0.0, 2.0)
        self._check_number("top_p", 0.0, 1.0, open_low=True)
        self._check_number("min_p", 0.0, 1.0)
        self._check_number("presence_penalty", -2.0, 2.0)
        self._check_number("frequency_penalty", -2.0, 2.0)
        self._check_number("repetition_penalty", 0.0, 100.0, open_low=True)
        self._check_int("n", 1, MAX_N)
        self._check_int("top_k", -1, 2**31 - 1)
        self._check_int("min_tokens", 0, 2**31 - 1)
        self._check_int("max_tokens", 0, 2**31 - 1, optional=True)
        self._check_int("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._check_int("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._check_int("thinking_token_budget", 0, 2**31 - 1, optional=True)
        self._check_int("seed", -(2**63), MAX_SEED, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"`min_tokens` must be <= `max_tokens` ({self.max_tokens}). Given: {self.min_tokens}.",
                param="min_tokens",
            )
        set_ = object.__setattr__
        set_(self, "top_k", max(self.top_k, 0))
        set_(self, "seed", None if self.seed is None else self.seed % 2**64)
        set_(self, "stop", self._checked_stop())
        set_(self, "stop_token_ids", self._checked_stop_token_ids())
        set_(self, "logit_bias", self._checked_logit_bias())

    def _check_number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fine or value > high or value < low or (open_low and value == low):
            bracket = "(" if open_low else "["
            raise InvalidRequestError(f"`{name}` must be in {bracket}{low:g}, {high:g}]. Given: {value!r}.", param=name)
        object.__setattr__(self, name, float(value))

    def _check_int(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidRequestError(f"`{name}` must be an integer in [{low}, {high}]. Given: {value!r}.", param=name)

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        fine = all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in stop[: MAX_STOP_STRINGS + 1])
        if len(stop) > MAX_STOP_STRINGS or not fine:
            raise InvalidRequestError(
                f"`stop` must be at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters."
                f" Given: {reprlib.repr(list(stop[:20]))}.",
                param="stop",
            )
        return stop

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"`stop_token_ids` may hold {MAX_STOP_TOKEN_IDS} ids at most. Given: {len(ids)}.",
                param="stop_token_ids",
            )
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise InvalidRequestError(
                f"`stop_token_ids` must be token ids >= 0. Given: {list(ids[:20])!r:.200}.", param="stop_token_ids"
            )
        return ids

    def _checked_logit_bias(self) -> Mapping[int, float] | None:
        if not self.logit_bias:
            return None
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequestError(
                f"`logit_bias` may name {MAX_BIASED_TOKENS} tokens at most. Given: {len(self.logit_bias)}.",
                param="logit_bias",
            )
        for token_id, bias in self.logit_bias.items():
            if not isinstance(token_id, int) or token_id < 0 or not math.isfinite(bias) or abs(bias) > 100:
                raise InvalidRequestError(
                    f"`logit_bias` must map token ids to values in [-100, 100]. Given: {token_id!r}: {bias!r}.",
                    param="logit_bias",
                )
        return dict(self.logit_bias)
