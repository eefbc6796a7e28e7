"""Paged attention in plain torch for a CPU: gather blocks into a scratch buffer, then one SDPA call a group.

Requests that compute one token are batched: the query heads that share a KV head become the query length, which turns
many tiny products into one call without a copy of KV per query head. Requests that compute several tokens run alone,
against their own new KV when they start a prompt, else against their gathered blocks with a bottom-right causal mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanoserve.model.attention.base import AttentionSpec, ForwardBatch, HeadNorms, IntArray, PlainLayout
from nanoserve.model.attention.heads import prepared_heads

# A group is closed when its KV outgrows this, to bound the scratch buffers and to keep them in the cache.
_MAX_GROUP_TOKENS = 2048
# A group is closed when a shorter request would make this share of its longest one padding.
_MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests of one token each: rows in the flat batch, blocks [size * num_blocks] and mask [size, 1, 1, length]."""

    rows: Tensor
    block_ids: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A request that computes several tokens: its rows, and blocks with mask when it has a computed prefix."""

    rows: slice
    block_ids: Tensor | None = None
    length: int = 0
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Metadata:
    slot_blocks: Tensor
    slot_offsets: Tensor
    groups: list[_DecodeGroup]
    chunks: list[_Chunk]


class CpuAttention(PlainLayout):
    """KV of one layer: [num_blocks, 2, block_size, num_kv_heads, head_dim], a strided view of the pool."""

    name = "cpu"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._group = spec.num_heads // spec.num_kv_heads
        self._scratch = [torch.empty(0, dtype=spec.dtype) for _ in range(2)]

    @staticmethod
    def reject(spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"the device is {spec.device.type}, not cpu"
        return None if spec.kv_cache_dtype == "auto" else "it keeps KV in the model's dtype only"

    def prepare(self, batch: ForwardBatch) -> _Metadata:
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        single = batch.query_lens == 1
        decodes, others = np.flatnonzero(single), np.flatnonzero(~single)
        groups = [self._decode_group(batch, starts, members) for members in _similar(batch.kv_lens, decodes)]
        chunks = [self._chunk(batch, int(starts[i]), int(i)) for i in others]
        return _Metadata(batch.slot_blocks, batch.slot_offsets, groups, chunks)

    def _decode_group(self, batch: ForwardBatch, starts: IntArray, members: IntArray) -> _DecodeGroup:
        kv_lens = batch.kv_lens[members]
        num_blocks = int(-(-kv_lens.max() // self._spec.block_size))
        length = int(kv_lens.max())
        mask = None
        if kv_lens.min() != length:
            padding = np.arange(length) >= kv_lens[:, None]
            mask = self._mask(torch.from_numpy(padding))[:, None, None]
        return _DecodeGroup(
            rows=torch.from_numpy(starts[members]),
            block_ids=torch.from_numpy(batch.block_tables[members, :num_blocks].reshape(-1)),
            length=length,
            mask=mask,
        )

    def _chunk(self, batch: ForwardBatch, start: int, index: int) -> _Chunk:
        query_len, kv_len = int(batch.query_lens[index]), int(batch.kv_lens[index])
        rows = slice(start, start + query_len)
        if query_len == kv_len:
            return _Chunk(rows)
        num_blocks = -(-kv_len // self._spec.block_size)
        future = torch.ones(query_len, kv_len, dtype=torch.bool).triu(kv_len - query_len + 1)
        block_ids = torch.from_numpy(batch.block_tables[index, :num_blocks].copy())
        return _Chunk(rows, block_ids, kv_len, self._mask(future))

    def _mask(self, hidden: Tensor) -> Tensor:
        """An additive mask: SDPA would turn a boolean one into this at every layer."""
        return torch.zeros(hidden.shape, dtype=self._spec.dtype).masked_fill_(hidden, float("-inf"))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, metadata: _Metadata) -> Tensor:
        keys, values = kv.unbind(1)
        keys.index_put_((metadata.slot_blocks, metadata.slot_offsets), k)
        values.index_put_((metadata.slot_blocks, metadata.slot_offsets), v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in metadata.groups:
            out[group.rows] = self._attend_group(q, keys, values, group)
        for chunk in metadata.chunks:
            out[chunk.rows] = self._attend_chunk(q, k, v, keys, values, chunk)
        return out.flatten(1)

    def forward_merged(
        self, qkv: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, kv: Tensor, metadata: _Metadata
    ) -> Tensor:
        q, k, v = prepared_heads(qkv, self._spec, norms, cos, sin)
        return self.forward(q, k, v, kv, metadata)

    def _attend_group(self, q: Tensor, keys: Tensor, values: Tensor, group: _DecodeGroup) -> Tensor:
        size = group.rows.shape[0]
        queries = q[group.rows].view(size, -1, self._group, self._spec.head_dim)
        k, v = (
            self._gather(part, group.block_ids, at).view(size, -1, *keys.shape[2:])[:, : group.length].transpose(1, 2)
            for at, part in enumerate((keys, values))
        )
        return scaled_dot_product_attention(queries, k, v, attn_mask=group.mask).flatten(1, 2)

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, chunk: _Chunk) -> Tensor:
        queries = q[chunk.rows].unflatten(1, (-1, self._group)).permute(2, 1, 0, 3)
        if chunk.block_ids is None:
            k, v = k[chunk.rows], v[chunk.rows]
        else:
            k = self._gather(keys, chunk.block_ids, 0)[: chunk.length]
            v = self._gather(values, chunk.block_ids, 1)[: chunk.length]
        # The query heads of a group are the batch axis; KV is broadcast over it with stride 0, not copied.
        k, v = (x.transpose(0, 1).expand(self._group, -1, -1, -1) for x in (k, v))
        causal = chunk.block_ids is None
        out = scaled_dot_product_attention(queries, k, v, attn_mask=chunk.mask, is_causal=causal)
        return out.permute(2, 1, 0, 3).flatten(1, 2)

    def _gather(self, part: Tensor, block_ids: Tensor, at: int) -> Tensor:
        """Copies blocks into a scratch buffer [num_blocks * block_size, num_kv_heads, head_dim].

        A fresh tensor of this size would cost a page fault every 4 KiB, as much as the copy itself.
        """
        shape = (block_ids.shape[0], *part.shape[1:])
        size = block_ids.shape[0] * part[0].numel()
        if self._scratch[at].numel() < size:
            self._scratch[at] = torch.empty(size, dtype=part.dtype)
        gathered = self._scratch[at][:size].view(shape)
        torch.index_select(part, 0, block_ids, out=gathered)
        return gathered.flatten(0, 1)


def _similar(kv_lens: IntArray, members: IntArray) -> Iterator[IntArray]:
    """Splits ``members`` into groups of similar length, longest first, within the bounds above."""
    order = members[np.argsort(-kv_lens[members], kind="stable")]
    lengths = kv_lens[order]
    first = 0
    while first < len(order):
        longest = int(lengths[first])
        room = max(_MAX_GROUP_TOKENS // longest, 1)
        tail = lengths[first : first + room]
        count = int(np.count_nonzero(tail >= longest * (1 - _MAX_PADDING) - 32))
        yield order[first : first + count]
        first += count
