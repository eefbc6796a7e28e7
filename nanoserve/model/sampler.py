"""Chooses tokens for a step: adjusts logits, draws, scores. **A token is a function of (logits row, seed, position).**

Settings that are off cost nothing: rows are grouped by what they need, and a batch that is greedy throughout is one
argmax.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoserve.core.plan import TokenLogprobs
from nanoserve.model.adjustments import SampleBatch, adjust
from nanoserve.model.blocked_logits import BlockedLogits
from nanoserve.model.choice import Settings, choose
from nanoserve.model.kernels.native import library
from nanoserve.model.kernels.triton import why_not
from nanoserve.model.logprobs import score
from nanoserve.model.native_choice import NativeChoice
from nanoserve.model.randomness import uniforms
from nanoserve.model.sampling_table import OFF, IntArray, SamplingTable

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens of a batch, and the log probabilities of the entries that asked for them."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]


class Sampler:
    """Reads the sampling table, which the runner keeps. ``device``: where logits come from."""

    def __init__(self, table: SamplingTable, device: torch.device = _CPU) -> None:
        self._table = table
        self._choose_on_device = _device_choice(table) if why_not(device) is None else None
        native = library()
        self._choose = _choose_in_torch if native is None else NativeChoice(native)

    def sample(self, logits: Tensor, batch: SampleBatch) -> Samples:
        """One token a row of ``logits`` [num_samples, vocab_size], any float dtype; float32 logits may be changed."""
        table = self._table
        num_logprobs = table.num_logprobs[batch.rows]
        scored = np.flatnonzero(num_logprobs != OFF)
        raw = logits[torch.from_numpy(scored)] if len(scored) else None
        if batch.allowed is not None or table.is_adjusted[batch.rows].any():
            logits = logits.float()
            adjust(logits, table, batch)
        tokens = self._tokens(logits, batch)
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            entries = score(raw, tokens[scored].tolist(), num_logprobs[scored].tolist())
            logprobs = dict(zip(scored.tolist(), entries, strict=True))
        return Samples(tokens.tolist(), logprobs)

    def _tokens(self, logits: Tensor, batch: SampleBatch) -> IntArray:
        if self._choose_on_device is not None:
            return self._choose_on_device(logits, batch)
        return self._choose(logits.cpu(), self._settings(batch))

    def _settings(self, batch: SampleBatch) -> Settings:
        table, rows = self._table, batch.rows
        return Settings(
            temperature=table.temperature[rows],
            top_k=table.top_k[rows],
            top_p=table.top_p[rows],
            log_min_p=table.log_min_p[rows],
            uniform=uniforms(table.seed[rows], batch.positions),
        )


def _device_choice(table: SamplingTable) -> Callable[[Tensor, SampleBatch], IntArray]:
    from nanoserve.model.device_choice import DeviceChoice

    return DeviceChoice(table)


def _choose_in_torch(logits: Tensor, settings: Settings) -> IntArray:
    return choose(BlockedLogits(BlockedLogits.widen(logits)), settings)
