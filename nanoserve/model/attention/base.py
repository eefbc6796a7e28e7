"""What every attention backend offers, and the flat description of a step that it prepares itself from."""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """All that a backend may judge by before anything is allocated. ``kv_cache_dtype``: auto (``dtype``) or int8."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """A layer's RMSNorms of query and key heads: weights [head_dim] and what is added to the mean square."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step, flat: the tokens of all requests one after another, in plan order.

    ``token_ids``, ``positions`` [num_tokens] feed the network. Request i computes ``query_lens[i]`` tokens and then
    holds ``kv_lens[i]`` of them; its blocks are the first ceil(kv_len / block_size) entries of ``block_tables[i]``.
    Token t stores its KV in block ``slot_blocks[t]`` at ``slot_offsets[t]``.
    """

    token_ids: Tensor
    positions: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    query_lens: IntArray
    kv_lens: IntArray
    block_tables: IntArray

    @classmethod
    def trial(cls, query_lens: IntArray, kv_lens: IntArray, block_tables: IntArray, block_size: int) -> Self:
        """A step of these lengths whose token ids do not matter, for checks and timings of attention alone."""
        owners = np.repeat(np.arange(len(query_lens)), query_lens)
        positions = np.arange(query_lens.sum()) + np.repeat(kv_lens - query_lens.cumsum(), query_lens)
        return cls(
            token_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.from_numpy(positions),
            slot_blocks=torch.from_numpy(block_tables[owners, positions // block_size]),
            slot_offsets=torch.from_numpy(positions % block_size),
            query_lens=query_lens,
            kv_lens=kv_lens,
            block_tables=block_tables,
        )


class PlainLayout:
    """KV of one layer: [num_blocks, 2, block_size, num_kv_heads, head_dim] in the model's dtype, a view of the pool."""

    _spec: AttentionSpec

    @property
    def kv_dtype(self) -> torch.dtype:
        return self._spec.dtype

    def kv_shape(self, *, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        spec = self._spec
        return (num_blocks, num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)

    def layer(self, pool: Tensor, index: int) -> Tensor:
        return pool[:, index]


class AttentionBackend(Protocol):
    """Stores KV of new tokens in a paged pool and attends over it. One instance serves all layers.

    ``kv`` of one layer has whatever shape the backend asked for; nobody else looks into it.
    """

    @property
    def name(self) -> str: ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of the pool."""
        ...

    def kv_shape(self, *, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Shape of the whole pool; the first axis is the block, so that a block of all layers is one copy."""
        ...

    def layer(self, pool: Tensor, index: int) -> Tensor:
        """The view of ``pool`` that is layer ``index``'s ``kv``."""
        ...

    def prepare(self, batch: ForwardBatch) -> Any:
        """Everything that all layers of a step share; handed back to :meth:`forward` as ``metadata``."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, metadata: Any) -> Tensor:
        """Stores ``k``, ``v`` [num_tokens, num_kv_heads, head_dim], then attends causally over all KV of each request.

        ``q`` [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim].
        """
        ...

    def forward_merged(
        self, qkv: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, kv: Tensor, metadata: Any
    ) -> Tensor:
        """:meth:`forward` of a merged projection, whose queries and keys are normed and rotated first.

        ``qkv`` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] may be overwritten; ``cos``, ``sin`` as from
        :class:`RotaryEmbedding`.
        """
        ...


class AttentionBackendClass(Protocol):
    """A backend before it is built."""

    def __call__(self, spec: AttentionSpec) -> AttentionBackend: ...

    def reject(self, spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve ``spec`` here; None when it can."""
        ...
