"""Times the linear layers of a Qwen3 shape, plain against packed, at a few numbers of rows.

    python -m benchmarks.kernels [--shape 0.6b] [--rows 1 16 512] [--threads 2]

Seconds are this thread's own CPU time when --threads is 1 (other processes do not count), else the wall clock's.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.make_checkpoint import SHAPES, Shape
from nanoserve.model.quant.none import NoQuantization


def main() -> None:
    """The command line; prints a markdown table of the best of several calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 512])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    print("| layer | rows | F.linear us | packed us | ratio |\n|---|---|---|---|---|")
    with torch.inference_mode():
        for name, (in_features, out_features) in linears(SHAPES[args.shape]).items():
            weight = torch.randn(out_features, in_features).bfloat16()
            packed = NoQuantization().prepare(weight, None)
            for rows in args.rows:
                x = torch.randn(rows, in_features).bfloat16()
                plain_us = best_us(partial(functional.linear, x, weight), clock)
                packed_us = best_us(partial(packed, x), clock)
                print(f"| {name} | {rows} | {plain_us:.0f} | {packed_us:.0f} | {plain_us / packed_us:.2f} |")


def linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of the merged projections of a layer."""
    q_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return {
        "qkv": (shape.hidden_size, q_size + 2 * kv_size),
        "o": (q_size, shape.hidden_size),
        "gate_up": (shape.hidden_size, 2 * shape.intermediate_size),
        "down": (shape.intermediate_size, shape.hidden_size),
    }


def best_us(call: Callable[[], Tensor], clock: Callable[[], float], repeat: int = 15) -> float:
    """Microseconds of the fastest of ``repeat`` calls."""
    times = []
    for _ in range(repeat):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times) * 1e6


if __name__ == "__main__":
    main()
