"""Token embedding."""

import torch
from torch import Tensor
from torch.nn import functional


class Embedding:
    """A table of rows, one a token id; the loader fills ``weight`` [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]."""
        return functional.embedding(token_ids, self.weight)
