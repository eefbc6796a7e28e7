"""Qwen3's self-attention: merged projections, a norm on each query and key head, rotary positions, paged KV."""

import torch
from torch import Tensor

from nanoserve.model.attention.base import AttentionBackend
from nanoserve.model.config import ModelConfig
from nanoserve.model.kernels import plain
from nanoserve.model.layers.linear import Linear
from nanoserve.model.quant.base import LinearMethod


class Attention:
    """One layer's attention. Knows heads and projections; where KV lies is its backend's business."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, method: LinearMethod, backend: AttentionBackend
    ) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps
        self._backend = backend
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(config.hidden_size, parts, bias=bias, dtype=dtype, method=method)
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, bias=bias, dtype=dtype, method=method)
        self.q_norm = torch.empty(config.head_dim, dtype=dtype)
        self.k_norm = torch.empty(config.head_dim, dtype=dtype)
        self._qk_weight: Tensor

    def slots(self, prefix: str) -> dict[str, Tensor]:
        norms = {f"{prefix}q_norm.weight": self.q_norm, f"{prefix}k_norm.weight": self.k_norm}
        return self.qkv_proj.slots(prefix) | self.o_proj.slots(prefix) | norms

    def prepare(self) -> None:
        self.qkv_proj.prepare()
        self.o_proj.prepare()
        norms = [self.q_norm] * self._num_heads + [self.k_norm] * self._num_kv_heads
        self._qk_weight = torch.stack(norms)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, metadata: object) -> Tensor:
        """``x`` [num_tokens, hidden_size]; ``cos``/``sin`` from :class:`RotaryEmbedding`; ``kv`` one layer's."""
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        qk, v = qkv.split((self._num_heads + self._num_kv_heads, self._num_kv_heads), dim=1)
        qk = plain.qk_norm_rope(qk, self._qk_weight, self._eps, cos, sin)
        q, k = qk.split((self._num_heads, self._num_kv_heads), dim=1)
        return self.o_proj(self._backend.forward(q, k, v, kv, metadata))
