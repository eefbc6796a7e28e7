"""What a request that generates nothing wants of its prompt's last token: an embedding, or some logits."""

from dataclasses import dataclass
from enum import StrEnum

from nanoserve.core.sampling import SamplingParams

NO_SAMPLING = SamplingParams(temperature=0, seed=0, max_tokens=0)
"""The settings of a request that pools."""


class PoolingKind(StrEnum):
    """``EMBED``: the hidden state after the final norm, scaled to length 1. ``SCORE``: logits."""

    EMBED = "embed"
    SCORE = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """``dimensions``: an embedding is cut to so many numbers before it is scaled; None keeps all of them.

    ``token_ids``: the tokens whose logits are wanted (of a classifier: the labels). The result is float32 numbers,
    little-endian, as bytes: they travel between processes as one copy.
    """

    kind: PoolingKind
    dimensions: int | None = None
    token_ids: tuple[int, ...] = ()
