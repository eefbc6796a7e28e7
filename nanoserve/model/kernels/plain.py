"""The small fused operations between two matrix products, in torch alone: the meaning that any faster kernel must keep.

All of them keep the dtype of their first argument and accumulate in float32 at least.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.model.kernels.base import LayerParts
from nanoserve.model.parallel import Collective


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds ``delta`` to ``x`` in place, then norms it."""
    return rms_norm(x.add_(delta), weight, eps)


def qk_norm_rope(qk: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm over each head, then rotary embedding, of query and key heads together.

    ``qk`` [num_tokens, num_heads + num_kv_heads, head_dim]; ``weight`` [num_heads + num_kv_heads, head_dim];
    ``cos``/``sin`` [num_tokens, 1, head_dim], the first half of ``sin`` negated. Rotates the halves against each other,
    as GPT-NeoX does; one roll and one fused multiply-add instead of six products of halves.
    """
    head_dim = qk.shape[-1]
    normed = functional.rms_norm(qk, (head_dim,), None, eps) * weight
    return torch.addcmul(normed * cos, normed.roll(head_dim // 2, dims=-1), sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the merged projection [num_tokens, 2 * intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Token t's sum of ``weights[t, j] * rows[places[t, j]]``, in order of j and in float32 -> [num_tokens, size].

    ``rows`` [num_rows, size]; ``places`` int64 and ``weights`` float32 [num_tokens, num_chosen].
    """
    total = torch.zeros(len(places), rows.shape[1], device=rows.device)
    for place, weight in zip(places.T, weights.T, strict=True):
        total.addcmul_(rows[place].float(), weight[:, None])
    return total.to(rows.dtype)


def fuse(layers: Sequence[LayerParts], backend: object, collective: Collective) -> None:
    """Torch has no operation for whole layers."""
