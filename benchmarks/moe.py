"""Times one mixture-of-experts layer against torch's grouped product, which is what serves without native kernels.

    python -m benchmarks.moe [--shape moe] [--rows 1 16 512] [--threads 2] [--repeat 9]
Both get the same input and weights, in turns; figures are medians. Milliseconds are this thread's own CPU time when
--threads is 1 (other processes do not count), else the wall clock's. Writes benchmarks/results/moe.json
(moe_int8.json and so on for other ways to store the experts).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.make_checkpoint import SHAPES, MoEShape
from benchmarks.report import table, write
from nanoserve.model.config import MoEConfig
from nanoserve.model.kernels import choose_kernels, plain
from nanoserve.model.kernels.base import Kernels
from nanoserve.model.kernels.native import library
from nanoserve.model.layers.moe import SparseMoE
from nanoserve.model.quant import LINEAR_METHODS, linear_method
from nanoserve.model.quant.base import LinearMethod, PreparedLinear
from nanoserve.model.quant.experts import GroupedExperts, PreparedExperts
from nanoserve.model.quant.none import NoQuantization


class TorchGrouped:
    """Full precision by torch's grouped product, whatever else there is."""

    name = "torch"

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        return NoQuantization().prepare(weight, bias)

    def prepare_experts(self, weight: Tensor) -> PreparedExperts:
        return GroupedExperts(weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = [name for name, shape in SHAPES.items() if isinstance(shape, MoEShape)]
    parser.add_argument("--shape", choices=shapes, default="moe")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 512])
    parser.add_argument("--quantization", choices=LINEAR_METHODS, default="none")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if (native := library()) is not None:
        native.set_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    shape = SHAPES[args.shape]
    assert isinstance(shape, MoEShape), "the choices say so"
    methods: dict[str, LinearMethod] = {"torch": TorchGrouped(), "nanoserve": linear_method(args.quantization)}
    fused = choose_kernels(shape.hidden_size, shape.moe_intermediate_size)
    layers = {name: make_layer(shape, method, plain if name == "torch" else fused) for name, method in methods.items()}
    rows = {f"{count} tokens": compare(layers, shape, count, args.repeat, clock) for count in args.rows}
    print(table(rows))
    record = {"shape": args.shape, "quantization": args.quantization, "threads": args.threads, "layers": rows}
    name = "moe" if args.quantization == "none" else f"moe_{args.quantization}"
    print(f"written: {write(name, record).name}")


def make_layer(shape: MoEShape, method: LinearMethod, kernels: Kernels) -> SparseMoE:
    config = MoEConfig(
        num_experts=shape.num_experts,
        num_experts_per_token=shape.num_experts_per_tok,
        intermediate_size=shape.moe_intermediate_size,
        normalizes_weights=shape.norm_topk_prob,
        dense_layers=frozenset(),
    )
    layer = SparseMoE(config, shape.hidden_size, dtype=torch.bfloat16, method=method, kernels=kernels)
    generator = torch.Generator().manual_seed(0)
    for slot in layer.slots("").values():
        slot.memory.normal_(0.0, 0.02, generator=generator)
    layer.prepare()
    return layer


@torch.inference_mode()
def compare(
    layers: dict[str, SparseMoE], shape: MoEShape, num_tokens: int, repeat: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median milliseconds of each layer, and torch's time as a multiple of ours."""
    x = torch.randn(num_tokens, shape.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in layers}
    for turn in range(repeat + 1):
        for name, layer in layers.items():
            start_s = clock()
            layer(x)
            times[name] += [(clock() - start_s) * 1e3] if turn else []
    medians = {name: statistics.median(values) for name, values in times.items()}
    num_hit = len(layers["torch"].gate(x)[1].unique())
    return {
        "experts_hit": num_hit,
        **{f"{name}_ms": value for name, value in medians.items()},
        "speedup": medians["torch"] / medians["nanoserve"],
    }


if __name__ == "__main__":
    main()
