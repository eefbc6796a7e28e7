"""Operations on whole rows: norms, the gate of a feed-forward layer, the weighted sum of experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST_OF_ONE_WARP = 256


def _warps(width: int) -> int:
    """A warp for every 256 elements of a row, up to 8."""
    return max(1, min(8, width // _WIDEST_OF_ONE_WARP))


@triton.jit
def norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, x_stride, delta_stride, size, eps,
    ADDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(delta_ptr + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        # The residual stream is kept in its own dtype; the norm sees the rounded sum, as in transformers.
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, stride, size, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weighted_sum_kernel(
    rows_ptr, places_ptr, weights_ptr, out_ptr, stride, size, COUNT: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < size
    total = tl.zeros([WIDTH], tl.float32)
    for j in tl.static_range(COUNT):
        place = tl.load(places_ptr + token * COUNT + j).to(tl.int64)
        weight = tl.load(weights_ptr + token * COUNT + j)
        total += weight * tl.load(rows_ptr + place * stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``kernels/plain.py``; ``x`` [num_rows, size]."""
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``kernels/plain.py``: ``x`` [num_rows, size] is changed in place."""
    assert x.shape == delta.shape, f"{tuple(delta.shape)} is added to {tuple(x.shape)}"
    return _norm(x, delta, weight, eps)


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, size = x.shape
    assert weight.shape == (size,), f"a weight of {tuple(weight.shape)} for rows of {size}"
    assert x.stride(1) == 1, "rows are read from end to end"
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        width = triton.next_power_of_2(size)
        second, stride = (x, 0) if delta is None else (delta, delta.stride(0))
        norm_kernel[(rows,)](
            x, second, weight, out, x.stride(0), stride, size, eps,
            ADDS=delta is not None, WIDTH=width, num_warps=_warps(width),
        )  # fmt: skip
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As ``kernels/plain.py``; ``gate_up`` [num_rows, 2 * size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "rows are read from end to end"
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        width = min(1024, triton.next_power_of_2(size))
        grid = (rows, triton.cdiv(size, width))
        silu_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), size, WIDTH=width, num_warps=_warps(width))
    return out


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """As ``kernels/plain.py``; ``places`` must lie within ``rows``, which is not checked."""
    assert places.shape == weights.shape, f"{tuple(places.shape)} places but {tuple(weights.shape)} weights"
    assert rows.stride(1) == 1, "rows are read from end to end"
    (num_tokens, count), size = places.shape, rows.shape[1]
    out = torch.empty(num_tokens, size, dtype=rows.dtype, device=rows.device)
    if num_tokens:
        width = min(1024, triton.next_power_of_2(size))
        grid = (num_tokens, triton.cdiv(size, width))
        places, weights = places.contiguous(), weights.contiguous()
        weighted_sum_kernel[grid](
            rows, places, weights, out, rows.stride(0), size, COUNT=count, WIDTH=width, num_warps=_warps(width)
        )
    return out
