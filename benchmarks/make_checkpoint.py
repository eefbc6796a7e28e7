"""Writes a Qwen3 checkpoint of a named shape with seeded random weights, for measuring speed without a download.

python -m benchmarks.make_checkpoint 0.6b|moe OUT [--seed 0] [--tokenizer FOLDER]
"""

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

_DEMO_FOLDER = Path(__file__).parents[1] / "nanoserve" / "demo_model"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen3; field names as in config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = True


@dataclass(frozen=True, slots=True)
class MoEShape(Shape):
    """The sizes of a Qwen3-MoE whose layers are all sparse."""

    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 384
    norm_topk_prob: bool = True


SHAPES = {
    "0.6b": Shape(1024, 3072, 28, 16, 8),
    "1.7b": Shape(2048, 6144, 28, 16, 8),
    "small": Shape(256, 768, 4, 4, 2, head_dim=64, vocab_size=8192),
    "moe": MoEShape(1024, 3072, 4, 16, 4),  # 30B-A3B scaled down: all of its experts, halves of its widths
    "small-moe": MoEShape(256, 768, 4, 4, 2, head_dim=64, vocab_size=8192, num_experts=16, moe_intermediate_size=96),
}


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its Hugging Face name."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if isinstance(shape, MoEShape):
        layer["mlp.gate"] = (shape.num_experts, hidden)
        inner, mlps = shape.moe_intermediate_size, [f"mlp.experts.{i}" for i in range(shape.num_experts)]
    else:
        mlps = ["mlp"]
    for mlp in mlps:
        layer |= {f"{mlp}.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        layer[f"{mlp}.down_proj"] = (hidden, inner)
    for index in range(shape.num_hidden_layers):
        tensors |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = (shape.vocab_size, hidden)
    return tensors


def random_weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    """bfloat16 weights: norms 1, the rest normal with std 0.02."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(name: str, size: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(size, dtype=torch.bfloat16)
        return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

    return {name: tensor(name, size) for name, size in tensor_shapes(shape).items()}


def write_checkpoint(shape: Shape, weights: dict[str, Tensor], folder: Path, *, tokenizer: Path | None = None) -> None:
    """Writes the weights, config.json and a copied tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if isinstance(shape, MoEShape) else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if isinstance(shape, MoEShape) else "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        **asdict(shape),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in _TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, default=_DEMO_FOLDER, help="folder whose tokenizer files are copied")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    write_checkpoint(shape, random_weights(shape, args.seed), args.folder, tokenizer=args.tokenizer)


if __name__ == "__main__":
    main()
