"""Token embedding."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


class Embedding:
    """A table of rows, one a token id; the loader fills ``weight`` [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype)
        self._rows: Callable[[Tensor], Tensor] = self._lookup

    def serve_from(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Drops the table: ``rows`` (ids -> their rows) reads it from the layer that it is tied to."""
        self._rows = rows
        self.weight = self.weight[:0].clone()

    def _lookup(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]."""
        return self._rows(token_ids)
