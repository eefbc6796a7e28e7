"""Token embedding, and which rows of the vocabulary a rank holds."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.model.parallel import ALONE, Collective
from nanoserve.model.slots import Slot


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """A rank's rows of a table of ``whole``: those from ``start``, ``size`` of them on every rank.

    ``held`` of them exist; the last ranks' may end before.
    """

    whole: int
    start: int
    size: int

    @staticmethod
    def of(whole: int, collective: Collective) -> "VocabularyShare":
        size = -(-whole // collective.size)
        return VocabularyShare(whole, collective.rank * size, size)

    @property
    def held(self) -> int:
        return max(0, min(self.size, self.whole - self.start))

    def slot(self, table: Tensor) -> Slot:
        """For ``table`` [size, hidden_size]; rows that do not exist become zero."""
        table[self.held :].zero_()
        return Slot(table[: self.held], 0, min(self.start, self.whole), self.whole)


class Embedding:
    """A table of rows, one a token id; the loader fills ``weight`` [vocab_size, hidden_size], or the rank's share."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, collective: Collective = ALONE) -> None:
        self._collective = collective
        self.share = VocabularyShare.of(vocab_size, collective)
        self.weight = torch.empty(self.share.size, hidden_size, dtype=dtype)
        self._rows: Callable[[Tensor], Tensor] = self._lookup

    def slot(self) -> Slot:
        return self.share.slot(self.weight)

    def serve_from(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Drops the table: ``rows`` (ids -> their rows) reads it from the layer that it is tied to."""
        self._rows = rows
        self.weight = self.weight[:0].clone()

    def _lookup(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]."""
        if self._collective.size == 1:
            return self._rows(token_ids)
        own = token_ids - self.share.start
        is_elsewhere = (own < 0) | (own >= self.share.size)
        rows = self._rows(own.masked_fill(is_elsewhere, 0))
        return self._collective.sum(rows.masked_fill_(is_elsewhere[:, None], 0))
