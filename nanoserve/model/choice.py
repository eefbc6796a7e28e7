"""From logits, settings and one uniform number a row to tokens. Pure: no state, no generator.

**The rule.** Order a row's tokens by falling logit, then rising id. min_p keeps those with at least ``min_p`` times the
best one's probability; top_k the first k of them; top_p the shortest beginning of the rest that has at least ``top_p``
of their mass. Among the kept ones, now in order of token id, the token is the first whose cumulative probability
exceeds the uniform number. (Filters in vLLM's order. The order by id keeps the choice steady when the last bits of two
nearly equal logits change, as they do with the batch size.)

Two ways lead there, and which one a row takes depends on its own logits and settings alone: the best few candidates
when the kept set provably lies among them, else a sort of the whole row.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from nanoserve.model.blocked_logits import BlockedLogits
from nanoserve.model.sampling_table import FloatArray, IntArray

_FEW, _MANY = 64, 256  # widths of the candidate list: the narrow one for a small top_k


@dataclass(frozen=True, slots=True)
class Settings:
    """One entry a logits row: columns of the sampling table, and ``uniform`` in [0, 1)."""

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    log_min_p: FloatArray
    uniform: FloatArray

    def __getitem__(self, entries: IntArray) -> "Settings":
        return Settings(*(getattr(self, field.name)[entries] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class _Columns:
    """Settings as float64 tensors [num_rows, 1]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    uniform: Tensor

    @staticmethod
    def of(settings: Settings) -> "_Columns":
        return _Columns(*(torch.from_numpy(getattr(settings, f.name).astype(float))[:, None] for f in fields(settings)))


def choose(logits: BlockedLogits, settings: Settings) -> IntArray:
    """One token id a row.

    Greedy when the temperature is 0 or top_k is 1, and when the best logit is not finite (nothing else has a meaning
    then).
    """
    finite = torch.isfinite(logits.maxima.amax(dim=1)).numpy()
    is_greedy = (settings.temperature == 0) | (settings.top_k == 1) | ~finite
    is_filtered = (settings.top_k > 0) | (settings.top_p < 1) | (settings.log_min_p > -np.inf)
    is_narrow = (settings.top_k > 0) & (settings.top_k < _FEW)
    tokens = np.zeros(len(is_greedy), dtype=np.int64)
    for is_member, pick in (
        (is_greedy, _pick_best),
        (~is_greedy & ~is_filtered, _pick_unfiltered),
        (~is_greedy & is_filtered & is_narrow, _pick_among_few),
        (~is_greedy & is_filtered & ~is_narrow, _pick_among_many),
    ):
        members = np.flatnonzero(is_member)
        if len(members):
            tokens[members] = pick(logits, members, settings[members]).numpy()
    return tokens


def _pick_best(logits: BlockedLogits, rows: IntArray, settings: Settings) -> Tensor:
    return logits.argmax(torch.from_numpy(rows))


def _pick_unfiltered(logits: BlockedLogits, rows: IntArray, settings: Settings) -> Tensor:
    """Inverse of the cumulative distribution in two levels: which block, then which token in it."""
    columns = _Columns.of(settings)
    weights = _weights(logits, torch.from_numpy(rows), columns)
    block_sums = weights.sum(dim=2, dtype=torch.float64)
    target = columns.uniform * block_sums.sum(dim=1, keepdim=True)
    block, before = _locate(block_sums, target)
    inside = weights[torch.arange(len(rows)), block].double()
    token, _ = _locate(inside, target - before)
    return block * inside.shape[1] + token


def _weights(logits: BlockedLogits, rows: Tensor, columns: _Columns) -> Tensor:
    """exp((logit - best) / temperature) [num_rows, num_blocks, block]."""
    best = logits.maxima[rows].amax(dim=1)[:, None, None]
    return (logits.blocks[rows] - best).div_(columns.temperature[:, :, None].float()).exp_()


def _locate(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative weight exceeds ``target``, and the cumulative weight before it [num_rows, 1].

    Rounding may push the target up to the total; then it is the last index that has weight.
    """
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    index = torch.minimum((cumulative <= target).sum(dim=1), (cumulative < total).sum(dim=1))[:, None]
    before = cumulative.gather(1, index) - weights.gather(1, index)
    return index[:, 0], before


def _pick_among_few(logits: BlockedLogits, rows: IntArray, settings: Settings) -> Tensor:
    return _pick_filtered(logits, rows, settings, _FEW)


def _pick_among_many(logits: BlockedLogits, rows: IntArray, settings: Settings) -> Tensor:
    return _pick_filtered(logits, rows, settings, _MANY)


def _pick_filtered(logits: BlockedLogits, rows: IntArray, settings: Settings, width: int) -> Tensor:
    where, columns = torch.from_numpy(rows), _Columns.of(settings)
    values, ids = logits.top(where, width)
    num_kept, is_certain = _count_kept(values.double(), columns, _total(logits, where, columns))
    if values.shape[1] == logits.flat.shape[1]:
        is_certain.fill_(True)
    tokens = _draw(values.double(), ids, num_kept, columns)
    unsure = torch.nonzero(~is_certain)[:, 0].numpy()
    if len(unsure):
        tokens[torch.from_numpy(unsure)] = _pick_sorted(logits, rows[unsure], settings[unsure])
    return tokens


def _pick_sorted(logits: BlockedLogits, rows: IntArray, settings: Settings) -> Tensor:
    columns = _Columns.of(settings)
    values, ids = logits.sorted(torch.from_numpy(rows))
    values = values.double()
    everything = torch.full((len(rows), 1), torch.inf, dtype=torch.float64)
    num_kept, _ = _count_kept(values, columns, everything)
    return _draw(values, ids, num_kept, columns)


def _total(logits: BlockedLogits, rows: Tensor, columns: _Columns) -> Tensor:
    """Mass of the whole row relative to its best token [num_rows, 1]; only where top_p alone filters, else infinite."""
    total = torch.full((len(rows), 1), torch.inf, dtype=torch.float64)
    alone = (columns.top_k == 0) & (columns.log_min_p == -torch.inf)
    members = torch.nonzero(alone[:, 0])[:, 0]
    if len(members):
        chosen = _Columns(*(getattr(columns, f.name)[members] for f in fields(columns)))
        weights = _weights(logits, rows[members], chosen)
        total[members] = weights.sum(dim=2, dtype=torch.float64).sum(dim=1, keepdim=True)
    return total


def _count_kept(values: Tensor, columns: _Columns, total: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the sorted ``values`` [num_rows, width] are kept, and whether that is certain from them alone.

    ``total`` [num_rows, 1]: the row's mass where nothing but top_p filters; infinite where it is not known.
    """
    width = values.shape[1]
    scaled = (values - values[:, :1]) / columns.temperature
    num_likely = (scaled >= columns.log_min_p).sum(dim=1, keepdim=True)
    num_top = torch.where(columns.top_k > 0, columns.top_k, torch.inf)
    is_bounded = (num_likely < width) | (num_top <= width)
    bound = torch.minimum(num_likely.double(), num_top).clamp(max=width).long()
    cumulative = scaled.exp().cumsum(dim=1)
    within = cumulative.gather(1, bound - 1)
    mass = torch.where(is_bounded | ~torch.isfinite(total), within, total)
    wanted = columns.top_p * mass
    num_nucleus = (cumulative < wanted).sum(dim=1, keepdim=True) + 1
    num_kept = torch.where(columns.top_p < 1, torch.minimum(bound, num_nucleus), bound)
    is_enough = is_bounded | (torch.isfinite(total) & (columns.top_p < 1) & (within >= wanted))
    is_inside = values.gather(1, num_kept - 1) > values[:, -1:]  # else tokens outside may tie with the last kept one
    return num_kept, (is_enough & is_inside)[:, 0]


def _draw(values: Tensor, ids: Tensor, num_kept: Tensor, columns: _Columns) -> Tensor:
    weights = ((values - values[:, :1]) / columns.temperature).exp()
    weights = weights.masked_fill(torch.arange(values.shape[1]) >= num_kept, 0.0)
    ids, order = ids.sort(dim=1)
    weights = weights.gather(1, order)
    index, _ = _locate(weights, columns.uniform * weights.sum(dim=1, keepdim=True))
    return ids.gather(1, index[:, None])[:, 0]
