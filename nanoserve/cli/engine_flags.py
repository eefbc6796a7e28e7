"""The engine's flags, the same for every command that loads a model; their names are the fields of ``EngineArgs``."""

import argparse
from typing import Any

from nanoserve.core.config import SPECULATION, EngineArgs

_DEFAULTS = EngineArgs()


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where to compute (default: auto)")
    group.add_argument("--dtype", help="auto, float32 or bfloat16 (default: auto, the checkpoint's own)")
    group.add_argument("--quantization", help="how weights are stored: none, int8, int4 or fp8 (default: none)")
    group.add_argument(
        "--deterministic", action="store_const", const=True,
        help="refuse to start unless logits are the same to the last bit in any batch",
    )  # fmt: skip
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus answer")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help=f"batch size (default: {_DEFAULTS.max_num_seqs})")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS", help="token budget of a step")
    group.add_argument("--block-size", type=int, metavar="TOKENS", help=f"(default: {_DEFAULTS.block_size})")
    memory = group.add_mutually_exclusive_group()
    memory.add_argument("--kv-cache-memory", metavar="SIZE", help="such as 4GiB")
    memory.add_argument("--memory-fraction", type=float, metavar="F", help="share of the free memory for the KV cache")
    group.add_argument(
        "--kv-cache-dtype", metavar="NAME", help="auto or int8, which holds twice the tokens (default: auto)"
    )
    group.add_argument("--kv-host-memory", metavar="SIZE", help="host memory for cached KV that the pool evicts")
    group.add_argument("--kv-disk-path", metavar="FOLDER", help="where a file keeps what the host memory evicts")
    group.add_argument("--kv-disk-memory", metavar="SIZE", help="how large that file may be")
    group.add_argument(
        "--attention-backend", metavar="NAME", help="native, cpu or reference (default: auto, the first)"
    )
    group.add_argument(
        "--enforce-eager", action="store_const", const=True, help="no CUDA graphs; a CPU always runs eagerly"
    )
    group.add_argument("--no-prefix-caching", dest="enable_prefix_caching", action="store_const", const=False)
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="processes (on GPUs: devices) that share an engine's model out (default: 1)",
    )
    group.add_argument("--speculation", choices=SPECULATION, help="guess tokens and verify them together")
    group.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="guesses a request and step (default: 8)"
    )
    group.add_argument("--num-threads", type=int, metavar="N", help="CPU threads per engine (default: all, shared)")


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as ``EngineArgs`` keywords; the others keep their defaults."""
    names = EngineArgs.__dataclass_fields__
    return {name: value for name, value in vars(options).items() if name in names and value is not None}
