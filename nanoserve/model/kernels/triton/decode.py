"""Paged attention of requests that compute one token: split over the context, then merged (Flash-Decoding, Dao 2023).

A program holds the query heads that share a KV head, padded to the 16 rows that the tensor cores want, and walks its
part of the context through the block table with a running maximum and sum. Parts beyond a request's length weigh
nothing, so the number of parts may be fixed before the lengths are known, as a captured graph needs it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoserve.model.kernels.triton.dot import dot
from nanoserve.model.kernels.triton.store import check_layer

LOG2_E = 1.4426950408889634
_ROWS = 16
_MAX_SPLITS = 32
_PROGRAMS_PER_SM = 8


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """``keys``: of one step of a program."""

    keys: int
    num_warps: int
    num_stages: int


def decode_config(head_dim: int, itemsize: int) -> DecodeConfig:
    """By the bytes of a key. float32, which has no tensor cores here, takes what registers hold."""
    if itemsize > 2:
        return DecodeConfig(16, 8, 1)
    return DecodeConfig(64, 4, 3) if head_dim <= 128 else DecodeConfig(32, 4, 2)


def decode_splits(num_requests: int, num_kv_heads: int, num_sms: int) -> int:
    """Parts of each context: enough programs that long requests do not leave most of the device idle at the end."""
    return max(1, min(_MAX_SPLITS, _PROGRAMS_PER_SM * num_sms // (num_requests * num_kv_heads)))


@triton.jit
def decode_kernel(
    q_ptr, kv_ptr, rows_ptr, tables_ptr, lens_ptr, out_ptr, partial_ptr, weight_ptr,
    q_stride, block_stride, table_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (request, KV head, split). ``scale`` is that of the scores times log2(e)."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + request)
    share = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    first = split * share
    last = tl.minimum(first + share, length)
    row = tl.load(rows_ptr + request).to(tl.int64)

    member = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, KEYS)
    heads = kv_head * GROUP + member
    in_group = (member < GROUP)[:, None]
    q = tl.load(q_ptr + row * q_stride + heads[:, None] * HEAD_DIM + dim[None, :], mask=in_group, other=0.0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    table = tables_ptr + request.to(tl.int64) * table_stride
    for start in range(first, last, KEYS):
        position = start + key
        seen = position < last
        block = tl.load(table + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        place = block * block_stride + (position % BLOCK_SIZE * NUM_KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(kv_ptr + place[None, :] + dim[:, None], mask=seen[None, :], other=0.0)
        scores = dot(q, k, tl.zeros([ROWS, KEYS], tl.float32)) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        fade = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        v_place = place + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
        v = tl.load(kv_ptr + v_place[:, None] + dim[None, :], mask=seen[:, None], other=0.0)
        acc = dot(weights.to(v.dtype), v, acc * fade[:, None])
        best = new_best

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        place_out = out_ptr + row * (NUM_KV_HEADS * GROUP * HEAD_DIM) + heads[:, None] * HEAD_DIM + dim[None, :]
        tl.store(place_out, result.to(out_ptr.dtype.element_ty), mask=in_group)
    else:
        part = (request.to(tl.int64) * NUM_KV_HEADS * GROUP + heads) * SPLITS + split
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dim[None, :], result, mask=in_group)
        log = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(weight_ptr + part, log, mask=member < GROUP)


@triton.jit
def merge_kernel(
    partial_ptr, weight_ptr, rows_ptr, out_ptr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (request, head): the parts of one head's context, weighed by their sums."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, WIDTH)
    dim = tl.arange(0, HEAD_DIM)
    first = (request * NUM_HEADS + head) * SPLITS
    logs = tl.load(weight_ptr + first + split, mask=split < SPLITS, other=float("-inf"))
    best = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(best == float("-inf"), 0.0, best))
    place = partial_ptr + (first + split)[:, None] * HEAD_DIM + dim[None, :]
    parts = tl.load(place, mask=(split < SPLITS)[:, None], other=0.0)
    total = tl.sum(weights, axis=0)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    tl.store(out_ptr + (row * NUM_HEADS + head) * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty))


def paged_decode(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    *,
    rows: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    num_splits: int,
    config: DecodeConfig,
) -> None:
    """Writes rows ``rows`` [num_requests] of ``out`` [num_tokens, num_heads * head_dim].

    ``q`` [num_tokens, num_heads, head_dim]; ``kv`` one layer of the pool; ``rows``, ``kv_lens`` [num_requests] and
    ``block_tables`` [num_requests, max_blocks] int32. A length of 0 gives zeros.
    """
    check_layer(kv)
    num_requests, (block_size, num_kv_heads, head_dim), num_heads = len(rows), kv.shape[2:], q.shape[1]
    assert q[0].is_contiguous(), "a token's queries lie together"
    assert out.is_contiguous(), "the kernel writes whole rows"
    assert len(block_tables) == len(kv_lens) == num_requests, "tables and lengths are of all requests"
    group = num_heads // num_kv_heads
    assert group <= _ROWS, f"a KV head serves at most {_ROWS} query heads, not {group}"
    partial, weights = out, out
    if num_splits > 1:
        parts = (num_requests, num_heads, num_splits)
        partial = torch.empty(*parts, head_dim, dtype=torch.float32, device=q.device)
        weights = torch.empty(parts, dtype=torch.float32, device=q.device)
    decode_kernel[(num_requests, num_kv_heads, num_splits)](
        q, kv, rows, block_tables, kv_lens, out, partial, weights,
        q.stride(0), kv.stride(0), block_tables.stride(0), head_dim**-0.5 * LOG2_E,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        ROWS=_ROWS, KEYS=config.keys, SPLITS=num_splits, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        merge_kernel[(num_requests, num_heads)](
            partial, weights, rows, out, NUM_HEADS=num_heads, HEAD_DIM=head_dim, SPLITS=num_splits,
            WIDTH=triton.next_power_of_2(num_splits), num_warps=1,
        )  # fmt: skip
