"""Qwen3, dense (Qwen team 2025, "Qwen3 technical report"): pre-norm decoder, grouped queries, a norm on each head.

A network here is built empty; :meth:`Qwen3ForCausalLM.slots` maps every checkpoint name to the memory it fills, and
:meth:`Qwen3ForCausalLM.prepare` turns the loaded weights into their final form. Only then may it run.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from nanoserve.model.attention.base import AttentionBackend
from nanoserve.model.config import ModelConfig
from nanoserve.model.kernels.base import Kernels, LayerParts, Stack
from nanoserve.model.layers.attention import Attention
from nanoserve.model.layers.embedding import Embedding
from nanoserve.model.layers.linear import Linear
from nanoserve.model.layers.mlp import GatedMLP
from nanoserve.model.layers.norm import RMSNorm
from nanoserve.model.layers.rotary import RotaryEmbedding
from nanoserve.model.parallel import ALONE, Collective
from nanoserve.model.quant.base import LinearMethod
from nanoserve.model.slots import Slot, Slots


class FeedForward(Protocol):
    """The second half of a decoder layer."""

    def slots(self, prefix: str) -> Slots: ...

    def prepare(self) -> None: ...

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape; on a rank of several an addend of the result."""
        ...


class DecoderLayer:
    """Attention, then the feed-forward layer, each behind a norm and added to the residual stream.

    ``config``: the sizes of this rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        mlp: FeedForward,
        *,
        dtype: torch.dtype,
        method: LinearMethod,
        backend: AttentionBackend,
        kernels: Kernels,
        collective: Collective,
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._sum = collective.sum
        self.input_layernorm = RMSNorm(hidden, eps, dtype, kernels)
        self.self_attn = Attention(config, dtype=dtype, method=method, backend=backend)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype, kernels)
        self.mlp = mlp

    def slots(self, prefix: str) -> Slots:
        return {
            f"{prefix}input_layernorm.weight": Slot(self.input_layernorm.weight),
            f"{prefix}post_attention_layernorm.weight": Slot(self.post_attention_layernorm.weight),
            **self.self_attn.slots(f"{prefix}self_attn."),
            **self.mlp.slots(f"{prefix}mlp."),
        }

    def prepare(self) -> None:
        self.self_attn.prepare()
        self.mlp.prepare()

    def parts(self) -> LayerParts | None:
        """For an operation that runs whole layers, after :meth:`prepare`; None where the feed-forward is not dense."""
        if not isinstance(self.mlp, GatedMLP):
            return None
        norms = self.self_attn.norms
        return LayerParts(
            input_norm=self.input_layernorm.weight,
            post_norm=self.post_attention_layernorm.weight,
            q_norm=norms.q,
            k_norm=norms.k,
            eps=norms.eps,
            qkv=self.self_attn.qkv_proj.prepared,
            o=self.self_attn.o_proj.prepared,
            gate_up=self.mlp.gate_up_proj.prepared,
            down=self.mlp.down_proj.prepared,
        )

    def __call__(
        self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, kv: Tensor, metadata: object
    ) -> Tensor:
        """Adds ``delta`` (of the layer before) and attention to the residual stream ``x`` in place; gives its own."""
        normed = self.input_layernorm(x) if delta is None else self.input_layernorm.after_adding(x, delta)
        attended = self._sum(self.self_attn(normed, cos, sin, kv, metadata))
        return self._sum(self.mlp(self.post_attention_layernorm.after_adding(x, attended)))


class Qwen3ForCausalLM:
    """The network from token ids to logits. ``max_positions`` bounds the rotary tables.

    ``config``: the sizes of one rank of ``collective`` (``ModelConfig.of_rank``).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        method: LinearMethod,
        backend: AttentionBackend,
        kernels: Kernels,
        max_positions: int,
        collective: Collective = ALONE,
    ) -> None:
        hidden = config.hidden_size
        self._tied = config.tie_word_embeddings
        self.embed_tokens = Embedding(config.vocab_size, hidden, dtype, collective)
        vocab = self.embed_tokens.share
        mlps = [
            self.feed_forward(config, index, dtype=dtype, method=method, kernels=kernels)
            for index in range(config.num_layers)
        ]
        self.layers = [
            DecoderLayer(
                config, mlp, dtype=dtype, method=method, backend=backend, kernels=kernels, collective=collective
            )
            for mlp in mlps
        ]
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype, kernels)
        self.lm_head = Linear(hidden, {"lm_head": vocab.size}, bias=False, dtype=dtype, method=method)
        if self._tied:
            self.lm_head.share(self.embed_tokens)
        self._kernels, self._backend, self._collective, self._vocab = kernels, backend, collective, vocab
        self._stack: Stack | None = None
        self._rotary = RotaryEmbedding(config.rope, head_dim=config.head_dim, max_positions=max_positions, dtype=dtype)

    @staticmethod
    def feed_forward(
        config: ModelConfig, index: int, *, dtype: torch.dtype, method: LinearMethod, kernels: Kernels
    ) -> FeedForward:
        """The feed-forward layer of decoder layer ``index``."""
        hidden, inner = config.hidden_size, config.intermediate_size
        return GatedMLP(hidden, inner, dtype=dtype, method=method, kernels=kernels, share=config.share)

    def slots(self) -> Slots:
        """Checkpoint name -> memory to fill. With tied embeddings there is no ``lm_head.weight`` to load."""
        slots = {"model.embed_tokens.weight": self.embed_tokens.slot(), "model.norm.weight": Slot(self.norm.weight)}
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{index}.")
        if self._tied:
            return slots
        return slots | {name: self._vocab.slot(slot.memory) for name, slot in self.lm_head.slots("").items()}

    def prepare(self) -> None:
        """Gives every loaded weight its final form, layer by layer, so that memory never holds two of all."""
        for layer in self.layers:
            layer.prepare()
        self.lm_head.prepare()
        self.fuse()

    def fuse(self) -> None:
        """Lets the kernels run all layers as one operation where they can, after the layers were prepared."""
        parts = [layer.parts() for layer in self.layers]
        dense = [part for part in parts if part is not None]
        are_all = len(dense) == len(parts)
        self._stack = self._kernels.fuse(dense, self._backend, self._collective) if are_all else None

    def forward(self, token_ids: Tensor, positions: Tensor, kv_layers: Iterable[Tensor], metadata: object) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of flat ``token_ids`` and ``positions`` [num_tokens]; stores KV."""
        x = self.embed_tokens(token_ids)
        cos, sin = self._rotary(positions)
        if self._stack is not None:
            return self._stack(x, cos, sin, kv_layers, metadata)
        delta: Tensor | None = None
        for layer, kv in zip(self.layers, kv_layers, strict=True):
            delta = layer(x, delta, cos, sin, kv, metadata)
        return x if delta is None else x.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] of :meth:`forward` -> [num_rows, vocab_size]; values are rank 0's alone."""
        return self._collective.join(self.lm_head(self.norm(hidden)))[:, : self._vocab.whole]
