"""The sampling rule of ``model/choice.py`` and ``model/adjustments.py``, written for one row with plain loops."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanoserve.core.sampling import SamplingParams

Row = NDArray[np.float64]
_MASK = 2**64 - 1


def adjusted(logits: Row, params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> Row:
    """Logits after bias, penalties and the min_tokens mask."""
    row = logits.astype(np.float64).copy()
    for token_id, bias in (params.logit_bias or {}).items():
        row[token_id] += bias
    for token_id in {*prompt, *output}:
        scale = params.repetition_penalty
        row[token_id] = row[token_id] / scale if row[token_id] > 0 else row[token_id] * scale
    for token_id in set(output):
        row[token_id] -= params.frequency_penalty * list(output).count(token_id) + params.presence_penalty
    if len(output) < params.min_tokens:
        row[list(params.stop_token_ids or ())] = -math.inf
    return row


def distribution(row: Row, params: SamplingParams) -> Row:
    """The exact probability of each token, kept set and all."""
    order = sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))
    best = row[order[0]]
    result = np.zeros(len(row))
    if params.temperature == 0 or params.top_k == 1 or not math.isfinite(best):
        result[np.argmax(row)] = 1.0
        return result
    weights = np.exp((row - best) / params.temperature)
    kept = [i for i in order if weights[i] >= params.min_p] if params.min_p else order
    kept = kept[: params.top_k] if params.top_k else kept
    if params.top_p < 1:
        wanted, mass, count = params.top_p * sum(weights[i] for i in kept), 0.0, 0
        while mass < wanted and count < len(kept):
            mass += weights[kept[count]]
            count += 1
        kept = kept[:count]
    result[kept] = weights[kept]
    result /= result.sum()
    return result


def pick(probabilities: Row, uniform: float) -> int:
    """The first token, in order of id, whose cumulative probability exceeds ``uniform``."""
    cumulative = np.cumsum(probabilities)
    above = np.flatnonzero(cumulative > uniform * cumulative[-1])
    return int(above[0])


def uniform(seed: int, position: int) -> float:
    """SplitMix64 in Python's own integers."""
    counter = (_mix((seed + 0x9E3779B97F4A7C15) & _MASK) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    return (_mix(counter) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
