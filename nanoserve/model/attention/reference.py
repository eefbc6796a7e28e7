"""The oracle: gathers each request's blocks and runs dense attention, step by obvious step, on any device.

Computes in float32, or in float64 when the queries are float64. Slow, and meant to stay so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.model.attention.base import AttentionSpec, ForwardBatch, HeadNorms, PlainLayout
from nanoserve.model.attention.heads import prepared_heads


@dataclass(frozen=True, slots=True)
class _Metadata:
    batch: ForwardBatch
    block_tables: list[Tensor]


class ReferenceAttention(PlainLayout):
    """Dense attention over gathered blocks. KV of one layer: [num_blocks, 2, block_size, num_kv_heads, head_dim]."""

    name = "reference"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    @staticmethod
    def reject(spec: AttentionSpec) -> str | None:
        return None if spec.kv_cache_dtype == "auto" else "it keeps KV in the model's dtype only"

    def prepare(self, batch: ForwardBatch) -> _Metadata:
        num_blocks = -(-batch.kv_lens // self._spec.block_size)
        device = batch.token_ids.device
        tables = [
            torch.as_tensor(table[:count]).to(device)
            for table, count in zip(batch.block_tables, num_blocks, strict=True)
        ]
        return _Metadata(batch, tables)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, metadata: _Metadata) -> Tensor:
        batch = metadata.batch
        kv[batch.slot_blocks, 0, batch.slot_offsets] = k
        kv[batch.slot_blocks, 1, batch.slot_offsets] = v
        outputs = []
        requests = zip(q.split(batch.query_lens.tolist()), metadata.block_tables, batch.kv_lens.tolist(), strict=True)
        for queries, table, kv_len in requests:
            keys, values = (part.flatten(0, 1)[:kv_len] for part in kv[table].unbind(1))
            outputs.append(dense_attention(queries, keys, values))
        return torch.cat(outputs).flatten(1)

    def forward_merged(
        self, qkv: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, kv: Tensor, metadata: _Metadata
    ) -> Tensor:
        q, k, v = prepared_heads(qkv, self._spec, norms, cos, sin)
        return self.forward(q, k, v, kv, metadata)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last ``len(q)`` positions over all of ``k``, ``v``; axes (position, head, head_dim)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), keys) / q.shape[-1] ** 0.5
    future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
