"""Qwen3-MoE (Qwen team 2025, "Qwen3 technical report"): Qwen3 whose feed-forward layers are mixtures of experts.

The released shapes are 30B-A3B and 235B-A22B. Checkpoints hold one tensor an expert and projection
(``mlp.experts.7.gate_proj.weight``); the loader also takes them stacked.
"""

import torch

from nanoserve.model.architectures.qwen3 import FeedForward, Qwen3ForCausalLM
from nanoserve.model.config import ModelConfig
from nanoserve.model.kernels.base import Kernels
from nanoserve.model.layers.moe import SparseMoE
from nanoserve.model.quant.base import LinearMethod


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """The dense network with other feed-forward layers."""

    @staticmethod
    def feed_forward(
        config: ModelConfig, index: int, *, dtype: torch.dtype, method: LinearMethod, kernels: Kernels
    ) -> FeedForward:
        assert config.moe is not None, "the configuration of a mixture of experts says so"
        if index in config.moe.dense_layers:
            return Qwen3ForCausalLM.feed_forward(config, index, dtype=dtype, method=method, kernels=kernels)
        hidden, share = config.hidden_size, config.share
        return SparseMoE(config.moe, hidden, dtype=dtype, method=method, kernels=kernels, share=share)
