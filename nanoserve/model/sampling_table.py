"""How each row of the batch wants its tokens chosen, as columns of numbers, so that a step reads them in one go."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanoserve.core.plan import AdmittedState
from nanoserve.core.request import ThinkingBudget
from nanoserve.core.sampling import SamplingParams

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

OFF = -1  # in ``num_logprobs``
_NOTHING: IntArray = np.zeros(0, dtype=np.int64)


class TokenCounts:
    """How often each token occurred in one request's output; prompt tokens are listed with count 0."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._slot: dict[int, int] = {}
        self._counts: list[int] = []
        self._add(dict.fromkeys(prompt), 0)
        self._add(output, 1)

    def _add(self, token_ids: Sequence[int] | dict[int, None], weight: int) -> None:
        for token_id in token_ids:
            slot = self._slot.setdefault(token_id, len(self._counts))
            if slot == len(self._counts):
                self._counts.append(weight)
            else:
                self._counts[slot] += weight

    def append(self, token_ids: Sequence[int]) -> None:
        self._add(token_ids, 1)

    def arrays(self, drafts: Sequence[int] = ()) -> tuple[IntArray, FloatArray]:
        """Token ids and their counts, as if ``drafts`` had been put out too."""
        counts = self
        if drafts:
            counts = TokenCounts((), ())
            counts._slot, counts._counts = dict(self._slot), list(self._counts)
            counts.append(drafts)
        return np.fromiter(counts._slot, np.int64), np.array(counts._counts, dtype=np.float64)


class Thoughts:
    """How many tokens the thoughts of one request have, until they end."""

    def __init__(self, budget: ThinkingBudget, output: Sequence[int]) -> None:
        self.budget = budget
        self._num_tokens = 0 if budget.open_id is None else -1
        self._are_closed = False
        self.append(output)

    def append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._are_closed:
                return
            self._are_closed = token_id == self.budget.close_id
            if self._num_tokens >= 0 or token_id == self.budget.open_id:
                self._num_tokens += 1

    def must_end(self, drafts: Sequence[int] = ()) -> bool:
        """Whether the next token closes them, as if ``drafts`` had been put out too."""
        thoughts = self
        if drafts:
            thoughts = Thoughts(self.budget, ())
            thoughts._num_tokens, thoughts._are_closed = self._num_tokens, self._are_closed
            thoughts.append(drafts)
        return not thoughts._are_closed and thoughts._num_tokens >= self.budget.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """What changes one row's logits before a token is chosen. Absent (None in the table) for most requests."""

    params: SamplingParams
    num_prompt_tokens: int
    stop_ids: IntArray
    bias_ids: IntArray
    bias_values: FloatArray
    counts: TokenCounts | None
    thoughts: Thoughts | None


class SamplingTable:
    """One entry a row. Written on admission; the counters inside an adjustment grow as tokens are sampled."""

    def __init__(self, max_rows: int) -> None:
        self.temperature = np.zeros(max_rows)
        self.top_k = np.zeros(max_rows, dtype=np.int64)
        self.top_p = np.ones(max_rows)
        self.log_min_p = np.full(max_rows, -np.inf)
        self.seed = np.zeros(max_rows, dtype=np.uint64)
        self.num_logprobs = np.full(max_rows, OFF)
        self.is_adjusted = np.zeros(max_rows, dtype=bool)
        self._adjustments: list[Adjustment | None] = [None] * max_rows

    def admit(self, row: int, state: AdmittedState) -> None:
        """Writes a row; whatever was there before is gone."""
        params = state.sampling
        assert params.seed is not None, "the door gives every request a seed"
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.log_min_p[row] = np.log(params.min_p) if params.min_p > 0 else -np.inf
        self.seed[row] = params.seed
        self.num_logprobs[row] = OFF if params.logprobs is None else params.logprobs
        self._adjustments[row] = _adjustment(state)
        self.is_adjusted[row] = self._adjustments[row] is not None

    def adjustment(self, row: int) -> Adjustment:
        adjustment = self._adjustments[row]
        assert adjustment is not None
        return adjustment

    def count(self, row: int, token_ids: Sequence[int]) -> None:
        """Counts the tokens that a step sampled, if this row's settings ask for it."""
        adjustment = self.adjustment(row)
        for counter in (adjustment.counts, adjustment.thoughts):
            if counter is not None:
                counter.append(token_ids)


def _adjustment(state: AdmittedState) -> Adjustment | None:
    params = state.sampling
    repeats = params.repetition_penalty != 1.0
    is_counting = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    holds_stops = params.min_tokens and params.stop_token_ids
    if not (is_counting or params.logit_bias or holds_stops or state.thinking):
        return None
    prompt, output = state.token_ids[: state.num_prompt_tokens], state.token_ids[state.num_prompt_tokens :]
    bias = params.logit_bias or {}
    return Adjustment(
        params=params,
        num_prompt_tokens=state.num_prompt_tokens,
        stop_ids=np.array(params.stop_token_ids, dtype=np.int64) if params.min_tokens else _NOTHING,
        bias_ids=np.array(list(bias), dtype=np.int64),
        bias_values=np.array(list(bias.values()), dtype=np.float64),
        counts=TokenCounts(prompt if repeats else (), output) if is_counting else None,
        thoughts=None if state.thinking is None else Thoughts(state.thinking, output),
    )
