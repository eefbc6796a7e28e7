"""Grammars beside the sampler: which tokens may come next, one packed bit mask row for each sample.

A matcher is rebuilt from the tokens sampled so far whenever a request is admitted, so preemption and failover need no
state of their own.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoserve.core.errors import ConfigError, InvalidRequestError
from nanoserve.core.plan import AdmittedState, SampledTokens, ScheduledRequest
from nanoserve.core.request import Grammar
from nanoserve.model.deep_stack import on_deep_stack

Allowed = tuple[NDArray[np.int64], Tensor]
"""Indices of the constrained samples of a step, and their bit masks [n, ceil(vocab_size / 32)] int32."""

_MAX_CACHED = 64
_MAX_CACHED_CHARS = 1024 * 1024  # a compiled grammar takes up to a hundred bytes for each character


class CompiledGrammar:
    """A grammar at its beginning; requests work on copies. Whoever holds it keeps it from being compiled again."""

    __slots__ = ("__weakref__", "matcher")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher


class GrammarTokenizer:
    """The vocabulary as the grammar library sees it; read from ``tokenizer.json`` on first use (about one second).

    ``vocab_size`` counts the rows of the logits. The grammars used last are kept, for another request, choice or life
    of the same one; so are all that somebody holds. The methods may be called from any thread.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._path = folder / "tokenizer.json"
        self.vocab_size = vocab_size
        self._lock = threading.Lock()  # of the tables; nothing is compiled under it
        self._loading = threading.Lock()
        self._loaded: dict[tuple[int, ...], Any] = {}
        self._held: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._num_recent_chars = 0

    def matcher(self, grammar: Grammar, output_token_ids: Sequence[int] = ()) -> "GrammarMatcher":
        """A matcher of ``grammar`` that has already seen ``output_token_ids``."""
        matcher = GrammarMatcher(self.compiled(grammar).matcher.deep_copy())
        matcher.accept(output_token_ids)
        return matcher

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar compiled, now where it was not; the matchers of one that cannot be have an ``error``."""
        with self._lock:
            found = self._held.get(grammar)
        if found is None:
            found = CompiledGrammar(self._compile(grammar))
        with self._lock:
            self._remember(grammar, found)
        return found

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher

        try:
            tokenizer = self._tokenizer(grammar.eos_token_ids)
        except (ConfigError, ValueError) as error:
            return _NoMatcher(str(error))
        matcher = on_deep_stack(lambda: LLMatcher(tokenizer, grammar.text, log_level=0))
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask builds tables that all copies share
        return matcher

    def _remember(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._held[grammar] = compiled
        if grammar not in self._recent:
            self._num_recent_chars += len(grammar.text)
        self._recent[grammar] = compiled
        self._recent.move_to_end(grammar)
        while len(self._recent) > _MAX_CACHED or self._num_recent_chars > _MAX_CACHED_CHARS:
            oldest, _ = self._recent.popitem(last=False)
            self._num_recent_chars -= len(oldest.text)

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> Any:
        with self._loading:
            if eos_token_ids not in self._loaded:
                self._loaded[eos_token_ids] = self._load(eos_token_ids)
            return self._loaded[eos_token_ids]

    def _load(self, eos_token_ids: tuple[int, ...]) -> Any:
        from llguidance import LLTokenizer

        if not self._path.is_file():
            raise ConfigError(f"Structured outputs need {self._path.name}, which this checkpoint does not have.")
        text = self._path.read_text(encoding="utf-8")
        num_tokens = _count_tokens(text)  # an EOS id among the padding rows has no text and is refused there
        eos = [token_id for token_id in eos_token_ids if token_id < num_tokens]
        return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos or None)


class _NoMatcher:
    """In the place of a matcher where the checkpoint has no tokenizer that grammars can be compiled for."""

    def __init__(self, error: str) -> None:
        self._error = error

    def deep_copy(self) -> "_NoMatcher":
        return self

    def is_error(self) -> bool:
        return True

    def is_stopped(self) -> bool:
        return True

    def get_error(self) -> str:
        return self._error


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
    """The matchers of the requests that an executor holds; most requests have none and cost nothing.

    Masks are made in a thread beside the network: nothing may be admitted, released or accepted before they are taken.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._matchers: dict[str, GrammarMatcher] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="nanoserve-masks")

    def admit(self, request_id: str, state: AdmittedState) -> None:
        if state.grammar is not None:
            output = state.token_ids[state.num_prompt_tokens :]
            self._matchers[request_id] = self._tokenizer.matcher(state.grammar, output)

    def release(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)

    def binds(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether any of these requests has a grammar."""
        return any(request.request_id in self._matchers for request in scheduled) if self._matchers else False

    def begin(self, scheduled: Sequence[ScheduledRequest]) -> Callable[[], Allowed | None]:
        """Starts the masks of a step, while the caller runs the network; the call that it returns waits for them.

        A sample after k drafts is masked as if these were accepted; samples after a draft that the grammar refuses can
        never count and stay unmasked.
        """
        constrained: list[tuple[int, ScheduledRequest]] = []
        num_samples = 0
        for request in scheduled if self._matchers else ():
            if request.num_samples and request.request_id in self._matchers:
                constrained.append((num_samples, request))
            num_samples += request.num_samples
        return self._worker.submit(self._allowed, constrained).result if constrained else lambda: None

    def _allowed(self, constrained: Sequence[tuple[int, ScheduledRequest]]) -> Allowed | None:
        """``constrained``: requests, each with the index of its first sample in the step."""
        entries: list[int] = []
        rows: list[Tensor] = []
        for start, request in constrained:
            masks = self._masks(self._matchers[request.request_id], request)
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
