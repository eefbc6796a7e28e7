"""Qwen3's self-attention: merged projections, a norm on each query and key head, rotary positions, paged KV."""

import torch
from torch import Tensor

from nanoserve.model.attention.base import AttentionBackend, HeadNorms
from nanoserve.model.config import ModelConfig
from nanoserve.model.layers.linear import Linear
from nanoserve.model.quant.base import LinearMethod
from nanoserve.model.slots import Slot, Slots


class Attention:
    """One layer's attention, or on a rank of several its heads' addend of it.

    Knows heads and projections; where KV lies is its backend's business.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, method: LinearMethod, backend: AttentionBackend
    ) -> None:
        self._backend = backend
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        rows = {"q_proj": config.share, "k_proj": config.kv_share, "v_proj": config.kv_share}
        out = {"o_proj": config.hidden_size}
        self.qkv_proj = Linear(config.hidden_size, parts, bias=bias, dtype=dtype, method=method, rows=rows)
        self.o_proj = Linear(q_size, out, bias=bias, dtype=dtype, method=method, columns=config.share)
        q_norm, k_norm = (torch.empty(config.head_dim, dtype=dtype) for _ in range(2))
        self.norms = HeadNorms(q=q_norm, k=k_norm, eps=config.rms_norm_eps)

    def slots(self, prefix: str) -> Slots:
        norms = {f"{prefix}q_norm.weight": Slot(self.norms.q), f"{prefix}k_norm.weight": Slot(self.norms.k)}
        return self.qkv_proj.slots(prefix) | self.o_proj.slots(prefix) | norms

    def prepare(self) -> None:
        self.qkv_proj.prepare()
        self.o_proj.prepare()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, metadata: object) -> Tensor:
        """``x`` [num_tokens, hidden_size]; ``cos``/``sin`` from :class:`RotaryEmbedding`; ``kv`` one layer's."""
        return self.o_proj(self._backend.forward_merged(self.qkv_proj(x), self.norms, cos, sin, kv, metadata))
