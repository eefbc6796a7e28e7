"""Times the linear layers of a Qwen3 shape and states each as a share of what this machine gives in the same run.

    python -m benchmarks.kernels [--shape 0.6b] [--rows 1 16 1024] [--quantization none int8 int4] [--threads 2]

The floor of a product is the longer of reading its weight at the measured bandwidth and computing at the measured peak
(torch's bfloat16 product of a good shape; twice that for 8-bit operands). Weights rotate over enough copies that no
cache holds them. Also the choice of tokens for 16 rows of 151,936 logits. Writes benchmarks/results/kernels.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from benchmarks.make_checkpoint import SHAPES, Shape
from benchmarks.report import table, write
from nanoserve.model.choice import Settings
from nanoserve.model.kernels.native import Library, library, memory, why_not
from nanoserve.model.native_choice import NativeChoice
from nanoserve.model.quant import LINEAR_METHODS, linear_method

_ROTATED_BYTES = 200 << 20
_VOCAB = 151_936


def main() -> None:
    """The command line; prints a markdown table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[n for n, s in SHAPES.items() if isinstance(s, Shape)], default="0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 1024])
    parser.add_argument("--quantization", nargs="+", choices=LINEAR_METHODS, default=list(LINEAR_METHODS))
    parser.add_argument("--layers", nargs="+", default=["gate_up", "down"], help="of qkv, o, gate_up, down")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    native = library()
    if native is None:
        parser.error(f"there are no native kernels: {why_not()}")
    torch.set_num_threads(args.threads)
    native.set_threads(args.threads)
    with torch.inference_mode():
        floor = {"read_GB/s": bandwidth(native) / 1e9, "bf16_GFLOP/s": peak() / 1e9}
        rows: dict[str, dict[str, float]] = {}
        shapes = linears(SHAPES[args.shape])
        for layer in args.layers:
            for name in args.quantization:
                rows |= measure(layer, shapes[layer], name, args.rows, floor)
        choices = {name: {"ms": choice_ms(native, **given)} for name, given in _CHOICES.items()}
    print(table({native.level: floor}), table(rows), table(choices), sep="\n\n")
    record = {"shape": args.shape, "threads": args.threads, "floor": floor, "linears": rows, "choices": choices}
    print(f"written: {write('kernels', record).name}")


def linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of the merged projections of a layer."""
    q_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return {
        "qkv": (shape.hidden_size, q_size + 2 * kv_size),
        "o": (q_size, shape.hidden_size),
        "gate_up": (shape.hidden_size, 2 * shape.intermediate_size),
        "down": (shape.intermediate_size, shape.hidden_size),
    }


def measure(
    layer: str, size: tuple[int, int], name: str, row_counts: Sequence[int], floor: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Microseconds and share of the floor for each number of rows."""
    in_features, out_features = size
    weight = torch.randn(out_features, in_features).bfloat16()
    one = linear_method(name).prepare(weight, None)
    copies = [one] + [linear_method(name).prepare(weight, None) for _ in range(_ROTATED_BYTES // one.weight_bytes)]
    rows = {}
    for count in row_counts:
        x = torch.randn(count, in_features).bfloat16()
        us = median_us([partial(linear, x) for linear in copies])
        read_us = one.weight_bytes / floor["read_GB/s"] / 1e3
        speed = floor["bf16_GFLOP/s"] * (1 if name == "none" else 2)
        compute_us = 2 * count * in_features * out_features / speed / 1e3
        share = max(read_us, compute_us) / us
        rows[f"{layer} {name} {count} rows"] = {"us": us, "share_of_floor": share, "GB/s": one.weight_bytes / us / 1e3}
    return rows


def bandwidth(native: Library) -> float:
    """Bytes a second that the threads read from huge pages; the best of several passes over more than any cache."""
    words = memory.zeros((512 << 18,), torch.int32).fill_(1)
    read = native.bind("ns_read", "pl")
    return words.nbytes / best_s(partial(read, words.data_ptr(), len(words)))


def peak() -> float:
    """bfloat16 operations a second of torch's own product, at a shape that suits it."""
    x, weight = torch.randn(1024, 2048).bfloat16(), torch.randn(4096, 2048).bfloat16()
    return 2 * 1024 * 2048 * 4096 / best_s(partial(functional.linear, x, weight))


_CHOICES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "unfiltered": {},
    "top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_p 0.95": {"top_p": 0.95},
}


def choice_ms(native: Library, **given: float) -> float:
    """Milliseconds for the tokens of 16 rows, peaked as a language model's are."""
    logits = (torch.randn(16, _VOCAB) * 2).bfloat16()
    logits[torch.arange(16), torch.arange(16) * 99] = 18.0
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "log_min_p": -np.inf, "uniform": 0.5} | given
    columns = {key: np.full(16, value, np.int64 if key == "top_k" else float) for key, value in values.items()}
    choose = partial(NativeChoice(native), logits, Settings(**columns))
    return median_us([choose]) / 1e3


def median_us(calls: Sequence[Callable[[], object]], repeat: int = 24) -> float:
    """Microseconds of the median of ``repeat`` calls, taken from ``calls`` in turn."""
    return statistics.median(seconds(calls[i % len(calls)]) for i in range(repeat)) * 1e6


def best_s(call: Callable[[], object], repeat: int = 8) -> float:
    return min(seconds(call) for _ in range(repeat))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
