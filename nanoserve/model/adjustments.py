"""Changes to logits before a token is chosen, in place and sparse: only tokens that a setting names are touched.

Order, as in vLLM: logit_bias, repetition penalty, frequency and presence penalties, then the masks: tokens that a
grammar does not allow, and stop tokens before min_tokens. Where a grammar leaves nothing but stop tokens, it wins. Last
comes the end of thoughts whose budget is spent, which leaves one token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nanoserve.model.sampling_table import FloatArray, IntArray, SamplingTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """The logits rows that sample in a step.

    Entry i belongs to row ``rows[i]`` of the sampling table and chooses the token at absolute position
    ``positions[i]`` of its request. ``drafts[i]``: proposed tokens between the sampled ones and entry i.
    ``allowed``: entries and their bitmasks [num_entries, ceil(vocab_size / 32)] int32, bit t % 32 of word t // 32 set
    when token t is allowed.
    """

    rows: IntArray
    positions: IntArray
    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    allowed: tuple[IntArray, Tensor] | None = None


def adjust(logits: Tensor, table: SamplingTable, batch: SampleBatch) -> None:
    """Applies every setting that is on to float32 ``logits`` [num_samples, vocab_size] in place."""
    entries = np.flatnonzero(table.is_adjusted[batch.rows])
    if len(entries):
        _add_bias(logits, table, batch, entries)
        _penalize(logits, table, batch, entries)
    if batch.allowed is not None:
        _mask_disallowed(logits, *batch.allowed)
    if len(entries):
        _mask_stops(logits, table, batch, entries)
        _end_thoughts(logits, table, batch, entries)


def _add_bias(logits: Tensor, table: SamplingTable, batch: SampleBatch, entries: IntArray) -> None:
    named = [(i, table.adjustment(batch.rows[i])) for i in entries]
    named = [(i, adjustment) for i, adjustment in named if len(adjustment.bias_ids)]
    if named:
        places = _places([(i, adjustment.bias_ids) for i, adjustment in named])
        values = np.concatenate([adjustment.bias_values for _, adjustment in named])
        logits[places] += torch.from_numpy(values).to(logits)


def _penalize(logits: Tensor, table: SamplingTable, batch: SampleBatch, entries: IntArray) -> None:
    ids: list[tuple[int, IntArray]] = []
    counts: list[FloatArray] = []
    settings: list[tuple[float, float, float]] = []
    for i in entries:
        adjustment = table.adjustment(batch.rows[i])
        if adjustment.counts is not None:
            row_ids, row_counts = adjustment.counts.arrays(batch.drafts.get(i, ()))
            params = adjustment.params
            ids.append((i, row_ids))
            counts.append(row_counts)
            settings.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
    if ids:
        sizes = [len(row_ids) for _, row_ids in ids]
        repeated = torch.from_numpy(np.repeat(np.array(settings), sizes, axis=0)).to(logits)
        _penalize_places(logits, _places(ids), torch.from_numpy(np.concatenate(counts)).to(logits), repeated)


def _penalize_places(logits: Tensor, places: tuple[Tensor, Tensor], counts: Tensor, settings: Tensor) -> None:
    """``counts`` [n] of occurrences in the output, ``settings`` [n, 3]: repetition, frequency, presence."""
    repetition, frequency, presence = settings.unbind(1)
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[places] = values - frequency * counts - presence * (counts > 0)


def _mask_stops(logits: Tensor, table: SamplingTable, batch: SampleBatch, entries: IntArray) -> None:
    masked = []
    for i in entries:
        adjustment = table.adjustment(batch.rows[i])
        if batch.positions[i] - adjustment.num_prompt_tokens < adjustment.params.min_tokens:
            masked.append((i, adjustment.stop_ids))
    if masked:
        places = _places(masked)
        before = logits[places]
        logits[places] = float("-inf")
        if batch.allowed is not None:
            is_stuck = logits[places[0]].amax(dim=1) == float("-inf")
            logits[places] = torch.where(is_stuck, before, logits[places])


def _end_thoughts(logits: Tensor, table: SamplingTable, batch: SampleBatch, entries: IntArray) -> None:
    """Leaves the closing token only; where a grammar forbids it (inside a character) the thoughts end a token later."""
    for i in entries:
        thoughts = table.adjustment(batch.rows[i]).thoughts
        if thoughts is not None and thoughts.must_end(batch.drafts.get(i, ())):
            close_id = thoughts.budget.close_id
            if logits[i, close_id] != float("-inf"):
                logits[i] = float("-inf")
                logits[i, close_id] = 0.0


def _places(ids: Sequence[tuple[int, IntArray]]) -> tuple[Tensor, Tensor]:
    """Index tensors (entry, token) of all (entry, token ids) pairs."""
    entries = np.repeat([i for i, _ in ids], [len(row_ids) for _, row_ids in ids])
    return torch.from_numpy(entries), torch.from_numpy(np.concatenate([row_ids for _, row_ids in ids]))


def _mask_disallowed(logits: Tensor, entries: IntArray, bitmask: Tensor) -> None:
    bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    disallowed = torch.from_numpy(bits == 0).to(logits.device)
    if len(entries) == len(logits):
        logits.masked_fill_(disallowed, float("-inf"))
    else:
        where = torch.from_numpy(entries)
        logits[where] = logits[where].masked_fill_(disallowed, float("-inf"))
