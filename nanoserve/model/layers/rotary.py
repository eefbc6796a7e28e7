"""Rotary position embedding (Su et al. 2021) and the context extensions that Qwen3 checkpoints use.

The angles of one step are looked up once and shared by all layers. Tables are built in float32, as transformers does,
so that positions agree with it to the last bit.
"""

import math

import torch
from torch import Tensor

from nanoserve.model.config import RopeConfig


class RotaryEmbedding:
    """cos and sin of every position below ``max_positions``."""

    def __init__(self, rope: RopeConfig, *, head_dim: int, max_positions: int, dtype: torch.dtype) -> None:
        frequencies, scale = inverse_frequencies(rope, head_dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self._cos = torch.cat((cos, cos), dim=1).to(dtype)[:, None]
        self._sin = torch.cat((-sin, sin), dim=1).to(dtype)[:, None]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens] -> cos, sin, each [num_tokens, 1, head_dim]; the first half of sin is negated."""
        return self._cos[positions], self._sin[positions]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position [head_dim // 2], and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_scale(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are slowed by ``factor``, short ones kept, those between blended."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain / rope.factor * (1 - blend) + plain * blend


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolate slow dimensions, keep fast ones, ramp between."""
    low, high = (_dimension_of_turns(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _dimension_of_turns(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The dimension that turns ``turns`` times over the original context."""
    wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
