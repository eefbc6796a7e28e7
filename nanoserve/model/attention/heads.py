"""From a merged projection to queries, keys and values, in torch."""

import torch
from torch import Tensor

from nanoserve.model.attention.base import AttentionSpec, HeadNorms
from nanoserve.model.kernels import plain


def prepared_heads(
    qkv: Tensor, spec: AttentionSpec, norms: HeadNorms, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [num_tokens, num_heads, head_dim] and keys, both normed and rotated, and values of ``qkv``.

    ``qkv`` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; ``cos``, ``sin`` [num_tokens, 1, head_dim].
    """
    num_rotated = spec.num_heads + spec.num_kv_heads
    heads = qkv.view(len(qkv), -1, spec.head_dim)
    weight = torch.cat((norms.q.expand(spec.num_heads, -1), norms.k.expand(spec.num_kv_heads, -1)))
    rotated = plain.qk_norm_rope(heads[:, :num_rotated], weight, norms.eps, cos, sin)
    return rotated[:, : spec.num_heads], rotated[:, spec.num_heads :], heads[:, num_rotated:]
