"""config.json means what transformers takes it to mean; what cannot be computed is refused by name."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanoserve.core.errors import ConfigError
from nanoserve.model.architectures import ARCHITECTURES
from nanoserve.model.config import load_config, parse_config
from nanoserve.model.layers.rotary import RotaryEmbedding, inverse_frequencies
from tests.checkpoints import sens_config

NAMES = tuple(ARCHITECTURES)

MINIMAL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}

ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 1e6},
    {"rope_theta": 1e6, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_theta": 1e6, "rope_scaling": YARN},
    {"rope_parameters": YARN | {"rope_theta": 1e6}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_theta": 1e4, "rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False}},
    {"rope_theta": 1e4, "rope_scaling": YARN | {"attention_factor": 1.5}},
    {"rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_rope_equals_transformers(rope: dict[str, Any]) -> None:
    config = parse_config(MINIMAL | rope, NAMES)
    theirs = sens_config(**({"rope_parameters": None} | deepcopy(rope)))
    embedding = Qwen3RotaryEmbedding(theirs)
    frequencies, scale = inverse_frequencies(config.rope, 32)
    torch.testing.assert_close(frequencies, embedding.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(embedding.attention_scaling)
    positions = torch.tensor([0, 1, 511, 4095])
    cos, sin = RotaryEmbedding(config.rope, head_dim=32, max_positions=4096, dtype=torch.float32)(positions)
    their_cos, their_sin = embedding(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos[:, 0], their_cos[0], rtol=0, atol=1e-4)
    signs = torch.tensor([-1.0] * 16 + [1.0] * 16)
    torch.testing.assert_close(sin[:, 0], their_sin[0] * signs, rtol=0, atol=1e-4)


def test_defaults() -> None:
    config = parse_config({key: v for key, v in MINIMAL.items() if key != "head_dim"}, NAMES)
    assert config.head_dim == 128
    assert not config.tie_word_embeddings
    assert config.dtype == "float32"
    assert parse_config(MINIMAL | {"num_key_value_heads": None}, NAMES).num_kv_heads == 4
    assert parse_config(MINIMAL | {"architectures": None}, NAMES).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("spelling", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}])
def test_dtype_in_either_spelling(spelling: dict[str, str]) -> None:
    assert parse_config(MINIMAL | spelling, NAMES).dtype == "bfloat16"


def test_scaling_stretches_the_context() -> None:
    assert parse_config(MINIMAL, NAMES).max_positions == 4096
    assert parse_config(MINIMAL | {"rope_scaling": YARN | {"factor": 16.0}}, NAMES).max_positions == 8192
    assert parse_config(MINIMAL | {"rope_scaling": YARN}, NAMES).max_positions == 4096


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "Qwen2ForCausalLM"),
        ({"architectures": [], "model_type": "qwen2"}, "qwen2"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "Qwen3ForTokenClassification"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": "yarn"}, "yarn"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(MINIMAL | change, NAMES)


def test_unused_sliding_window_is_fine() -> None:
    parse_config(MINIMAL | {"use_sliding_window": False, "sliding_window": 4096}, NAMES)


@pytest.mark.parametrize("text", ["", "{", "[1]", None])
def test_an_unreadable_config_is_a_clear_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path, NAMES)
