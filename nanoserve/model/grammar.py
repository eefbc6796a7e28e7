"""Grammars beside the sampler: which tokens may come next, one packed bit mask row a request.

A matcher is rebuilt from the tokens sampled so far whenever a request is admitted, so preemption and failover need no
state of their own.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer

from nanoserve.core.errors import ConfigError
from nanoserve.core.request import Grammar


class GrammarTokenizer:
    """The vocabulary as the grammar library sees it; read from ``tokenizer.json`` on first use (about one second).

    ``vocab_size`` counts the rows of the logits; ``eos_token_ids`` may follow once a grammar is complete.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = folder / "tokenizer.json"
        self.vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None

    def matcher(self, grammar: Grammar, output_token_ids: Sequence[int]) -> "GrammarMatcher":
        """A matcher of ``grammar`` that has already seen ``output_token_ids``."""
        if self._tokenizer is None:
            if not self._path.is_file():
                raise ConfigError(f"Structured outputs need {self._path.name}, which this checkpoint does not have.")
            text = self._path.read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self._eos_token_ids)
        matcher = GrammarMatcher(LLMatcher(self._tokenizer, grammar.text, log_level=0), grammar.start_after_token_id)
        matcher.accept(output_token_ids)
        return matcher


class GrammarMatcher:
    """Where one request stands in its grammar. The runner owns it: ``fill`` before sampling, ``accept`` after."""

    def __init__(self, matcher: LLMatcher, start_after_token_id: int | None) -> None:
        self._matcher = matcher
        self._waits_for = start_after_token_id
        if matcher.is_error():  # checked at the door with the same library, so only a bug gets here
            raise RuntimeError(f"grammar does not compile: {matcher.get_error()}")

    @property
    def binds(self) -> bool:
        """Whether the next token is constrained: the grammar has begun, and has not been left by an unruly token."""
        return self._waits_for is None and not self._matcher.is_error()

    def fill(self, row: torch.Tensor) -> None:
        """Write the allowed tokens as bits, lowest first, into ``row`` (int32 ``[ceil(vocab_size / 32)]``)."""
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())

    def accept(self, token_ids: Sequence[int]) -> None:
        """Move on by sampled tokens. After the end of the grammar further tokens are ignored."""
        for token_id in token_ids:
            if self._waits_for is not None:
                if token_id == self._waits_for:
                    self._waits_for = None
            elif not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)
