"""A checkpoint's ``config.json`` as one checked value, with the meaning transformers 5 gives to it. Torch-free.

Whatever the network cannot compute exactly is refused here, by name, before any weight is read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoserve.core.errors import ConfigError
from nanoserve.model.share import WHOLE, Share

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DEFAULT_ROPE_THETA = 10_000.0  # transformers' default when neither place names one
_MOE = "Qwen3MoeForCausalLM"
_BY_MODEL_TYPE = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": _MOE}
_DEFAULT_HEAD_DIM = 128  # Qwen3's default; Qwen3-MoE's is hidden_size / num_attention_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding settings; which of them are read depends on ``rope_type`` (see ``layers/rotary.py``)."""

    rope_type: str = "default"
    theta: float = _DEFAULT_ROPE_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A mixture of experts, each of ``intermediate_size``; ``num_experts_per_token`` of them compute a token.

    ``normalizes_weights``: the weights of the chosen add up to one. ``dense_layers`` have a plain feed-forward layer.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool
    dense_layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model. ``dtype`` is the checkpoint's own; ``max_positions`` its context length.

    Counts of heads and inner features may be one rank's (:meth:`of_rank`): ``share`` of the whole model's, for KV heads
    ``kv_share``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    tie_word_embeddings: bool
    dtype: str
    moe: MoEConfig | None = None
    share: Share = WHOLE
    kv_share: Share = WHOLE

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Sizes of the rows that norms and activations see."""
        return (self.hidden_size, self.intermediate_size, *((self.moe.intermediate_size,) if self.moe else ()))

    def of_rank(self, rank: int, num_ranks: int) -> "ModelConfig":
        """The sizes of what ``rank`` holds; where KV heads are fewer than ranks, several hold the same one.

        The vocabulary stays whole here: its shares need not be equal (``layers/embedding.py``).

        Raises:
            ConfigError: the model cannot be shared out evenly.
        """
        self._check_shares(num_ranks)
        num_kv_shares = min(num_ranks, self.num_kv_heads)
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=self.num_kv_heads // num_kv_shares,
            intermediate_size=self.intermediate_size // num_ranks,
            moe=self.moe and replace(self.moe, intermediate_size=self.moe.intermediate_size // num_ranks),
            share=Share(rank, num_ranks),
            kv_share=Share(rank * num_kv_shares // num_ranks, num_kv_shares),
        )

    def _check_shares(self, num_ranks: int) -> None:
        counts = {"attention heads": self.num_heads, "inner features": self.intermediate_size}
        if self.moe is not None:
            counts["inner features of an expert"] = self.moe.intermediate_size
        wishes = [f"divide the model's {count} {name}" for name, count in counts.items() if count % num_ranks]
        if self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            wishes.append(f"divide the model's {self.num_kv_heads} KV heads or be a multiple of them")
        if wishes:
            raise ConfigError(
                f"`tensor_parallel_size` must {wishes[0]}. Given: {num_ranks}.", param="tensor_parallel_size"
            )


def load_config(folder: Path, architectures: tuple[str, ...]) -> ModelConfig:
    """Reads ``folder/config.json``; ``architectures`` are the names that can be built.

    Raises:
        ConfigError: the file is unreadable, or asks for something that is not supported; the key is named.
    """
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json of the model cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("config.json of the model is not a JSON object.")
    return parse_config(raw, architectures)


def parse_config(raw: Mapping[str, Any], architectures: tuple[str, ...]) -> ModelConfig:
    """The checked value of a parsed ``config.json``; see :func:`load_config`."""
    architecture = _architecture(raw, architectures)
    _refuse_unsupported(raw)
    num_heads = _count(raw, "num_attention_heads")
    num_kv_heads = _count(raw, "num_key_value_heads", default=num_heads)
    hidden_size, num_layers = _count(raw, "hidden_size"), _count(raw, "num_hidden_layers")
    is_moe = architecture == _MOE
    head_dim = _count(raw, "head_dim", default=hidden_size // num_heads if is_moe else _DEFAULT_HEAD_DIM)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})."
        )
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim must be even for rotary embeddings. Given: {head_dim}.")
    positions = _count(raw, "max_position_embeddings", default=32768)
    rope = _rope(raw, positions)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=_context_length(rope, positions),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=rope,
        attention_bias=_flag(raw, "attention_bias"),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        moe=_moe(raw, num_layers) if is_moe else None,
    )


def _moe(raw: Mapping[str, Any], num_layers: int) -> MoEConfig:
    """transformers 5 calls ``num_experts`` ``num_local_experts``. One layer in ``decoder_sparse_step`` is sparse."""
    num_experts = _count(raw, "num_local_experts", default=_count(raw, "num_experts", default=128))
    num_chosen = _count(raw, "num_experts_per_tok", default=8)
    if num_chosen > num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok ({num_chosen}) must be at most the number of experts ({num_experts})."
        )
    step = _count(raw, "decoder_sparse_step", default=1)
    named = raw.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(index, int) for index in named):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of layer numbers. Given: {named!r}.")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=num_chosen,
        intermediate_size=_count(raw, "moe_intermediate_size", default=768),
        normalizes_weights=_flag(raw, "norm_topk_prob"),
        dense_layers=frozenset(i for i in range(num_layers) if i in named or (i + 1) % step),
    )


def _architecture(raw: Mapping[str, Any], architectures: tuple[str, ...]) -> str:
    named = raw.get("architectures") or []
    if not named and raw.get("model_type") in _BY_MODEL_TYPE:
        named = [_BY_MODEL_TYPE[raw["model_type"]]]
    for name in named:
        if name in architectures:
            return str(name)
    given = ", ".join(map(str, named)) or f"model_type {raw.get('model_type')!r}"
    raise ConfigError(f"The architecture {given} is not supported; supported: {', '.join(architectures)}.")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        raise ConfigError("config.json: use_sliding_window is true; sliding window attention is not supported.")
    for kind in raw.get("layer_types") or ():
        if kind != "full_attention":
            raise ConfigError(f"config.json: layer_types holds {kind!r}; only full_attention is supported.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act must be silu. Given: {raw['hidden_act']!r}.")
    if raw.get("quantization_config"):
        raise ConfigError("config.json: quantization_config is set; quantized checkpoints are not supported yet.")


def _rope(raw: Mapping[str, Any], positions: int) -> RopeConfig:
    """Old place: ``rope_theta`` and ``rope_scaling`` at top level. New place: ``rope_parameters``, theta inside.

    As in transformers 5, ``rope_scaling`` wins over ``rope_parameters``, and a theta inside wins over one outside.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if isinstance(given, Mapping) and isinstance(given.get("full_attention"), Mapping):
        given = given["full_attention"]
    if not isinstance(given, Mapping):
        raise ConfigError(f"config.json: rope settings must be an object. Given: {given!r}.")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}.")
    if _number(given, "partial_rotary_factor", _number(raw, "partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor other than 1 is not supported.")
    original = _count(given, "original_max_position_embeddings", default=positions)
    original = _count(raw, "original_max_position_embeddings", default=original)
    if kind in ("linear", "llama3") and given.get("factor") is None:
        raise ConfigError(f"config.json: the rope type {kind!r} needs `factor`.")
    return RopeConfig(
        rope_type=kind,
        theta=_number(given, "rope_theta", _number(raw, "rope_theta", _DEFAULT_ROPE_THETA)),
        factor=_number(given, "factor", positions / original),
        original_max_position_embeddings=original,
        attention_factor=_optional_number(given, "attention_factor"),
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        mscale=_optional_number(given, "mscale"),
        mscale_all_dim=_optional_number(given, "mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
        low_freq_factor=_number(given, "low_freq_factor", 1.0),
        high_freq_factor=_number(given, "high_freq_factor", 4.0),
    )


def _context_length(rope: RopeConfig, positions: int) -> int:
    """Scaling stretches the context: Qwen3's YaRN recipe keeps max_position_embeddings and adds a factor."""
    if rope.rope_type == "yarn":
        return max(positions, int(rope.original_max_position_embeddings * rope.factor))
    return int(positions * rope.factor) if rope.rope_type == "linear" else positions


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json: {key} is missing.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} must be an integer >= 1. Given: {value!r}.")
    return value


def _optional_number(raw: Mapping[str, Any], key: str) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"config.json: {key} must be a number > 0. Given: {value!r}.")
    return float(value)


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = _optional_number(raw, key)
    return default if value is None else value


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key) or False
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} must be true or false. Given: {value!r}.")
    return value
