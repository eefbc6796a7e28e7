"""What requests that generate nothing take from their last token's hidden state."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.core.plan import SampledTokens, ScheduledRequest
from nanoserve.core.pooling import PoolingKind, PoolingParams
from nanoserve.model.attention.base import IntArray

Project = Callable[[Tensor], Tensor]


def pool(
    scheduled: Sequence[ScheduledRequest], query_lens: IntArray, hidden: Tensor, *, norm: Project, logits: Project
) -> dict[str, SampledTokens]:
    """The result of each request that pools in this step, from ``hidden`` [num_tokens, hidden_size].

    ``norm`` and ``logits`` are the network's: the final norm, and the norm with the head behind it.
    """
    wanted = [(index, request.pooling) for index, request in enumerate(scheduled) if request.pooling is not None]
    if not wanted:
        return {}
    last = query_lens.cumsum() - 1
    pooled: dict[str, SampledTokens] = {}
    for kind, project in ((PoolingKind.EMBED, norm), (PoolingKind.SCORE, logits)):
        own = [(index, params) for index, params in wanted if params.kind is kind]
        if own:
            rows = project(hidden[torch.from_numpy(last[[index for index, _ in own]])]).float()
            for (index, params), row in zip(own, rows, strict=True):
                pooled[scheduled[index].request_id] = SampledTokens(pooled=_numbers(row, params))
    return pooled


def _numbers(row: Tensor, params: PoolingParams) -> bytes:
    if params.kind is PoolingKind.SCORE:
        numbers = row[list(params.token_ids)]
    else:
        numbers = functional.normalize(row[: params.dimensions], dim=0)
    return numbers.cpu().numpy().astype("<f4", copy=False).tobytes()
