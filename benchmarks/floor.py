"""The least time that a machine needs for a dense Qwen3's work: its weights and KV read, its products computed.

Measured in the run that uses it: read bandwidth over huge pages and the peaks of torch's own (oneDNN) matrix products,
the best of several tries each.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from nanoserve.model.kernels.native.memory import zeros

_READ_BYTES, _SIDE, _TRIES = 2**29, 2048, 12
_BYTES_PER_WEIGHT = {"none": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Bytes a second read from memory; operations (2 a multiply-add) a second in bf16 and int8."""

    read: float
    bf16: float
    int8: float

    def best(self, other: "Machine") -> "Machine":
        """What the machine gave at its quietest of two measurements."""
        return Machine(
            read=max(self.read, other.read), bf16=max(self.bf16, other.bf16), int8=max(self.int8, other.int8)
        )

    def peak(self, quantization: str) -> float:
        return self.bf16 if quantization == "none" else self.int8


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A dense Qwen3 in numbers: weights of its layers' matrices, of its head, and what attention costs a token.

    ``kv_bytes``: bf16 K and V of one token. ``attention_flops``: of one query token for one cached token.
    """

    layer_weights: int
    head_weights: int
    kv_bytes: int
    attention_flops: int

    def decode_s(self, machine: Machine, quantization: str, *, batch: int, context: int) -> float:
        """Least seconds of a step that gives each of ``batch`` sequences of ``context`` tokens one more."""
        weights = self.layer_weights + self.head_weights
        num_bytes = weights * _BYTES_PER_WEIGHT[quantization] + batch * context * self.kv_bytes
        flops = batch * (2 * weights + context * self.attention_flops)
        return max(num_bytes / machine.read, flops / machine.peak(quantization))

    def prefill_s(self, machine: Machine, quantization: str, *, num_tokens: int, length: int) -> float:
        """Least seconds to compute ``num_tokens`` of prompts of ``length``; each sees half of its prompt on average."""
        flops = num_tokens * (2 * self.layer_weights + length // 2 * self.attention_flops)
        num_bytes = self.layer_weights * _BYTES_PER_WEIGHT[quantization]
        return max(flops / machine.peak(quantization), num_bytes / machine.read)


def read_work(folder: Path) -> Work:
    """Counts of a checkpoint's config.json. Embedding rows that are only looked up do not count."""
    c = json.loads((folder / "config.json").read_text())
    hidden, q_size = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    kv_size, layers = c["num_key_value_heads"] * c["head_dim"], c["num_hidden_layers"]
    return Work(
        layer_weights=layers * hidden * (2 * q_size + 2 * kv_size + 3 * c["intermediate_size"]),
        head_weights=hidden * c["vocab_size"],
        kv_bytes=layers * 2 * kv_size * 2,
        attention_flops=layers * 4 * q_size,
    )


def measure(num_threads: int) -> Machine:
    """A few seconds; other work on the cores lowers what it finds."""
    torch.set_num_threads(num_threads)
    region = zeros((_READ_BYTES,), torch.uint8).fill_(1).view(torch.float32).view(64, -1)
    x, weight = torch.randn(_SIDE, _SIDE).bfloat16(), torch.randn(_SIDE, _SIDE).bfloat16()
    operations = 2 * _SIDE**3
    return Machine(
        read=_READ_BYTES / _best_s(lambda: region.amax(1)),
        bf16=operations / _best_s(lambda: functional.linear(x, weight)),
        int8=operations / _best_s(_int8_product()),
    )


def _int8_product() -> Callable[[], object]:
    """uint8 activations by int8 weights, packed beforehand, as oneDNN likes them best."""
    x = torch.randint(0, 255, (_SIDE, _SIDE), dtype=torch.uint8)
    weight = torch.randint(-127, 127, (_SIDE, _SIDE), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [_SIDE, _SIDE])
    scales, zero_points = torch.ones(_SIDE), torch.zeros(_SIDE, dtype=torch.int64)
    multiply = torch.ops.onednn.qlinear_pointwise
    return lambda: multiply(x, 1.0, 0, packed, scales, zero_points, None, 1.0, 0, torch.bfloat16, "none", [], "")


def _best_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
