"""Grammars beside the sampler: which tokens may come next, one packed bit mask row for each sample.

A matcher is rebuilt from the tokens sampled so far whenever a request is admitted, so preemption and failover need no
state of their own.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoserve.core.errors import ConfigError, InvalidRequestError
from nanoserve.core.plan import AdmittedState, SampledTokens, ScheduledRequest
from nanoserve.core.request import Grammar

_MAX_COMPILED = 64


class GrammarTokenizer:
    """The vocabulary as the grammar library sees it; read from ``tokenizer.json`` on first use (about one second).

    ``vocab_size`` counts the rows of the logits. The grammars compiled last are kept, for another request, choice or
    life of the same one. ``prepare`` may be called from any thread.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._path = folder / "tokenizer.json"
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._loaded: dict[tuple[int, ...], Any] = {}
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def matcher(self, grammar: Grammar, output_token_ids: Sequence[int] = ()) -> "GrammarMatcher":
        """A matcher of ``grammar`` that has already seen ``output_token_ids``."""
        matcher = GrammarMatcher(self.prepare(grammar).deep_copy())
        matcher.accept(output_token_ids)
        return matcher

    def prepare(self, grammar: Grammar) -> Any:
        """The grammar compiled, at its beginning."""
        from llguidance import LLMatcher

        with self._lock:
            if grammar not in self._compiled:
                tokenizer = self._tokenizer(grammar.eos_token_ids)
                self._compiled[grammar] = LLMatcher(tokenizer, grammar.text, log_level=0)
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> Any:
        from llguidance import LLTokenizer

        if eos_token_ids not in self._loaded:
            if not self._path.is_file():
                raise ConfigError(f"Structured outputs need {self._path.name}, which this checkpoint does not have.")
            text = self._path.read_text(encoding="utf-8")
            num_tokens = _count_tokens(text)  # an EOS id among the padding rows has no text and is refused there
            eos = [token_id for token_id in eos_token_ids if token_id < num_tokens]
            self._loaded[eos_token_ids] = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos or None)
        return self._loaded[eos_token_ids]


class GrammarMatcher:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str | None:
        """Why the grammar can bind no longer: it does not compile with this vocabulary, or grew beyond all limits."""
        return self._matcher.get_error() if self._matcher.is_error() else None

    def fill(self, row: Tensor) -> bool:
        """Write the allowed tokens as bits, lowest first, into ``row`` (int32 ``[ceil(vocab_size / 32)]``).

        False when there is an ``error``; nothing useful is written then.
        """
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        return not self._matcher.is_error()

    def accept(self, token_ids: Sequence[int]) -> None:
        """Move on by sampled tokens. What follows the grammar's end is ignored."""
        for token_id in token_ids:
            if self._matcher.is_stopped():
                return
            self._matcher.consume_token(token_id)

    def try_accept(self, token_id: int) -> bool:
        """Move on by a proposed token if the grammar takes it."""
        return bool(self._matcher.try_consume_tokens([token_id]))

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        if num_tokens:
            self._matcher.rollback(num_tokens)


class GrammarTable:
    """The matchers of the requests that an executor holds; most requests have none and cost nothing."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._matchers: dict[str, GrammarMatcher] = {}

    def admit(self, request_id: str, state: AdmittedState) -> None:
        if state.grammar is not None:
            output = state.token_ids[state.num_prompt_tokens :]
            self._matchers[request_id] = self._tokenizer.matcher(state.grammar, output)

    def release(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)

    def binds(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether any of these requests has a grammar."""
        return any(request.request_id in self._matchers for request in scheduled) if self._matchers else False

    def allowed(
        self, scheduled: Sequence[ScheduledRequest], starts: Sequence[int]
    ) -> tuple[NDArray[np.int64], Tensor] | None:
        """(sample indices, their bit masks [n, ceil(vocab_size / 32)] int32) of the constrained samples of a step.

        ``starts[i]`` is the index of the first sample of ``scheduled[i]``. A sample after k drafts is masked as if
        these were accepted; samples after a draft that the grammar refuses can never count and stay unmasked.
        """
        if not self._matchers:
            return None
        entries: list[int] = []
        rows: list[Tensor] = []
        for request, start in zip(scheduled, starts, strict=True):
            matcher = self._matchers.get(request.request_id)
            if matcher is not None and request.num_samples:
                masks = self._masks(matcher, request)
                entries += range(start, start + len(masks))
                rows += masks
        return (np.array(entries, dtype=np.int64), torch.stack(rows)) if rows else None

    def _masks(self, matcher: GrammarMatcher, request: ScheduledRequest) -> list[Tensor]:
        drafts = request.token_ids[len(request.token_ids) - request.num_samples + 1 :]
        masks: list[Tensor] = []
        num_taken = 0
        for draft in (*drafts, None):
            row = torch.empty(-(-self._tokenizer.vocab_size // 32), dtype=torch.int32)
            if not matcher.fill(row):
                break
            masks.append(row)
            if draft is None or not matcher.try_accept(draft):
                break
            num_taken += 1
        matcher.rollback(num_taken)
        return masks

    def accept(self, sampled: dict[str, SampledTokens]) -> None:
        """Move the matchers on by the tokens of a step; a request whose grammar failed gets its error instead."""
        for request_id, matcher in self._matchers.items():
            if request_id not in sampled:
                continue
            matcher.accept(sampled[request_id].token_ids)
            if matcher.error is not None:
                message = f"The grammar cannot be followed: {' '.join(matcher.error.split())[:300]}"
                sampled[request_id] = SampledTokens(error=(InvalidRequestError.type, message))


def _count_tokens(tokenizer_json: str) -> int:
    """One more than the last id that the tokenizer knows."""
    parsed = json.loads(tokenizer_json)
    added = [token["id"] for token in parsed.get("added_tokens", ())]
    return 1 + max(*parsed["model"]["vocab"].values(), *added, -1)
