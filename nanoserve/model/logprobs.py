"""Log probabilities of tokens from the model's own logits, before any setting changed them (vLLM's default)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoserve.core.plan import TokenLogprobs
from nanoserve.model.blocked_logits import BlockedLogits


def score(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry a row of ``logits`` [num_rows, vocab_size]: of its token, and of its ``num_top`` best ones.

    A rank counts the strictly better tokens, plus one.
    """
    width = min(max(num_top), logits.shape[1])
    logits = BlockedLogits.widen(logits)
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, tokens)
    ranks = (logits > chosen).sum(dim=1) + 1
    tops: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if width:
        values, ids = BlockedLogits(logits).top(torch.arange(len(token_ids), device=logits.device), width)
        pairs = zip(ids.tolist(), (values - normalizer).tolist(), strict=True)
        tops = [list(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
    rows = zip(token_ids, (chosen - normalizer)[:, 0].tolist(), ranks.tolist(), tops, num_top, strict=True)
    return [TokenLogprobs(token_id, logprob, rank, tuple(top[:count])) for token_id, logprob, rank, top, count in rows]
