"""The product of rows sorted by expert with the weights of their experts, in one launch.

Which expert a tile of rows belongs to follows from ``ends`` on the device, so the launch has one size whatever the
router chose, as a captured graph needs it: tiles enough for the worst split of the rows, the rest of which do nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoserve.model.kernels.triton.dot import dot


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A program computes ``rows`` x ``columns`` of the result, ``depth`` of the sum at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def experts_config(num_rows: int, num_experts: int) -> ExpertsConfig:
    """By how many rows an expert has on average: few are bound by reading weights, many by multiplying."""
    average = num_rows / num_experts
    if average <= 16:
        return ExpertsConfig(16, 128, 64, 4, 4)
    return ExpertsConfig(64, 128, 64, 4, 3) if average <= 256 else ExpertsConfig(128, 128, 64, 8, 3)


@triton.jit
def experts_kernel(
    x_ptr, weight_ptr, ends_ptr, out_ptr, x_stride, out_features, in_features,
    NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Grid (tile of rows, tile of columns). ``WIDTH`` is the power of two from ``NUM_EXPERTS`` up."""
    tile = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    known = expert < NUM_EXPERTS
    ends = tl.load(ends_ptr + expert, mask=known, other=0)
    begins = tl.load(ends_ptr + expert - 1, mask=known & (expert > 0), other=0)
    num_tiles = tl.where(known, tl.cdiv(ends - begins, ROWS), 0)
    tiles_before = tl.cumsum(num_tiles, axis=0) - num_tiles
    is_mine = (tiles_before <= tile) & (tile < tiles_before + num_tiles)
    if tl.sum(is_mine.to(tl.int32), axis=0) > 0:
        mine = tl.sum(tl.where(is_mine, expert, 0), axis=0)
        first = tl.sum(tl.where(is_mine, begins + (tile - tiles_before) * ROWS, 0), axis=0)
        end = tl.sum(tl.where(is_mine, ends, 0), axis=0)
        row = first.to(tl.int64) + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        has_row, has_column = (row < end)[:, None], (column < out_features)[None, :]
        weight_ptr += mine.to(tl.int64) * out_features * in_features
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, in_features, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            has_depth = depth < in_features
            x = tl.load(x_ptr + row[:, None] * x_stride + depth[None, :], mask=has_row & has_depth[None, :], other=0.0)
            weight_place = weight_ptr + column[None, :].to(tl.int64) * in_features + depth[:, None]
            weight = tl.load(weight_place, mask=has_column & has_depth[:, None], other=0.0)
            acc = dot(x, weight, acc)
        place = out_ptr + row[:, None] * out_features + column[None, :]
        tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=has_row & has_column)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``x`` [num_rows, in_features] sorted by expert, ``weight`` [num_experts, out_features, in_features].

    ``ends`` int32 [num_experts]: expert e owns the rows before ``ends[e]`` that e - 1 does not.
    """
    num_rows, (num_experts, out_features, in_features) = len(x), weight.shape
    assert x.shape[1] == in_features, f"input is {tuple(x.shape)}, the weight {tuple(weight.shape)}"
    assert x.stride(1) == 1, "rows are read from end to end"
    assert weight.is_contiguous(), "an expert's weight lies together"
    assert ends.shape == (num_experts,), f"{tuple(ends.shape)} ends of {num_experts} experts"
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows:
        config = experts_config(num_rows, num_experts)
        most_tiles = min(num_rows, triton.cdiv(num_rows, config.rows) + num_experts - 1)
        experts_kernel[(most_tiles, triton.cdiv(out_features, config.columns))](
            x, weight, ends, out, x.stride(0), out_features, in_features,
            NUM_EXPERTS=num_experts, WIDTH=triton.next_power_of_2(num_experts), ROWS=config.rows,
            COLUMNS=config.columns, DEPTH=config.depth, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out
