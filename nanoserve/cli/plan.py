"""``nanoserve plan``: what a model needs and how fast a device can be with it, from its ``config.json`` alone."""

import argparse
from dataclasses import replace

from nanoserve.core.config import EngineArgs, parse_bytes
from nanoserve.core.errors import ConfigError
from nanoserve.model.config import ModelConfig
from nanoserve.observe.plan import DEVICES, Load, ModelShape, lines

_DEFAULTS = EngineArgs()
_WEIGHT_BYTES = {"int8": 1.0, "int4": 4.25 / 8, "fp8": 1.0}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help='a folder, a hub id (only its config.json is fetched) or "demo"')
    parser.add_argument("--device", choices=tuple(DEVICES), required=True, help="what it is to run on")
    parser.add_argument("--memory", metavar="SIZE", help="of each device, such as 64GiB (default: the device's own)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="devices (default: 1)")
    parser.add_argument("--dtype", choices=("auto", *_DTYPE_BYTES), default="auto")
    parser.add_argument("--quantization", choices=("none", *_WEIGHT_BYTES), default="none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="(default: the model's context)")
    parser.add_argument("--max-num-seqs", type=int, default=_DEFAULTS.max_num_seqs, metavar="N")
    parser.add_argument("--max-num-batched-tokens", type=int, default=_DEFAULTS.max_num_batched_tokens, metavar="N")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from nanoserve.model.architectures import ARCHITECTURES
    from nanoserve.model.config import load_config
    from nanoserve.model.folder import resolve_config

    config = load_config(resolve_config(options.model), tuple(ARCHITECTURES))
    device = DEVICES[options.device]
    if options.memory is not None:
        device = replace(device, memory_bytes=parse_bytes(options.memory))
    for line in lines(_shape(config, options), device, _load(config, options)):
        print(line)
    return 0


def _load(config: ModelConfig, options: argparse.Namespace) -> Load:
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"`{name}` must be >= 1. Given: {value}.", param=name)
    return Load(
        max_model_len=options.max_model_len or config.max_positions,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        tensor_parallel_size=options.tensor_parallel_size,
    )


def _shape(config: ModelConfig, options: argparse.Namespace) -> ModelShape:
    """The counts of Qwen3: fused or not, its projections hold the same weights."""
    hidden, layers, moe = config.hidden_size, config.num_layers, config.moe
    dtype_bytes = _DTYPE_BYTES.get(config.dtype if options.dtype == "auto" else options.dtype, 2)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = q_size + 2 * kv_size + hidden if config.attention_bias else 0
    num_dense = layers if moe is None else len(moe.dense_layers)
    routers = 0 if moe is None else (layers - num_dense) * hidden * moe.num_experts
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        attention_weights=layers * (hidden * (2 * q_size + 2 * kv_size) + biases),
        dense_weights=num_dense * 3 * hidden * config.intermediate_size + routers,
        norm_weights=layers * (2 * hidden + 2 * config.head_dim) + hidden,
        is_tied=config.tie_word_embeddings,
        weight_bytes=_WEIGHT_BYTES.get(options.quantization, dtype_bytes),
        dtype_bytes=dtype_bytes,
        kv_head_bytes=config.head_dim + 4 if options.kv_cache_dtype == "int8" else config.head_dim * dtype_bytes,
        widest_row=max(q_size + 2 * kv_size, 2 * config.intermediate_size if num_dense else 0),
        expert_weights=0 if moe is None else 3 * hidden * moe.intermediate_size,
        num_experts=0 if moe is None else moe.num_experts,
        num_active_experts=0 if moe is None else moe.num_experts_per_token,
        num_moe_layers=layers - num_dense,
    )
