"""Paged attention of requests that compute several tokens after a prefix in the pool (FlashAttention-2, Dao 2023).

All keys are read through the block table, the new ones too, since they are stored first. Query i of n over a context of
m tokens sees the first m - n + i + 1 of them.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nanoserve.model.kernels.triton.decode import LOG2_E
from nanoserve.model.kernels.triton.dot import dot
from nanoserve.model.kernels.triton.store import check_layer


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A program holds ``queries`` and reads ``keys`` at a time."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, itemsize: int, arch: int) -> PrefillConfig:
    """By the bytes of a key, so that tiles fit into shared memory; float32, without tensor cores, into registers.

    ``arch``: of the GPU, 90 for Hopper, from which on tensor cores read shared memory instead of registers.
    """
    if itemsize > 2:
        return PrefillConfig(16, 16, 4, 1)
    return PrefillConfig(128, 64, 8, 3) if arch >= 90 and head_dim <= 128 else PrefillConfig(64, 32, 4, 2)


@triton.jit
def _attend(
    q, kv_ptr, table, best, total, acc, first, last, kv_len, query_position, kv_head, block_stride, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, MASKS: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, HEAD_DIM)
    for start in range(first, last, KEYS):
        position = start + tl.arange(0, KEYS)
        stored = position < kv_len
        block = tl.load(table + position // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        place = block * block_stride + (position % BLOCK_SIZE * NUM_KV_HEADS + kv_head) * HEAD_DIM
        v_place = place + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
        k = tl.load(kv_ptr + place[None, :] + dim[:, None], mask=stored[None, :], other=0.0)
        scores = dot(q, k, tl.zeros([QUERIES, KEYS], tl.float32)) * scale
        if MASKS:
            scores = tl.where(position[None, :] <= query_position[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        fade = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(kv_ptr + v_place[:, None] + dim[None, :], mask=stored[:, None], other=0.0)
        acc = dot(weights.to(v.dtype), v, acc * fade[:, None])
        best = new_best
    return best, total, acc


@triton.jit
def prefill_kernel(
    q_ptr, kv_ptr, tiles_ptr, starts_ptr, query_lens_ptr, kv_lens_ptr, tables_ptr, out_ptr,
    q_stride, block_stride, table_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Grid (tile, query head); a tile is a request and the first of its queries."""
    tile, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles_ptr + 2 * tile)
    first_query = tl.load(tiles_ptr + 2 * tile + 1)
    query_len, kv_len = tl.load(query_lens_ptr + request), tl.load(kv_lens_ptr + request)
    kv_head = head // GROUP
    query = first_query + tl.arange(0, QUERIES)
    dim = tl.arange(0, HEAD_DIM)
    inside = (query < query_len)[:, None]
    row = tl.load(starts_ptr + request).to(tl.int64) + query
    q = tl.load(q_ptr + row[:, None] * q_stride + head * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    query_position = kv_len - query_len + query
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
    table = tables_ptr + request.to(tl.int64) * table_stride
    end = tl.minimum(kv_len - query_len + first_query + QUERIES, kv_len)
    open_end = (kv_len - query_len + first_query + 1) // KEYS * KEYS  # every query sees all keys before
    best, total, acc = _attend(
        q, kv_ptr, table, best, total, acc, 0, open_end, kv_len, query_position, kv_head, block_stride, scale,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUERIES, KEYS, False,
    )  # fmt: skip
    best, total, acc = _attend(
        q, kv_ptr, table, best, total, acc, open_end, end, kv_len, query_position, kv_head, block_stride, scale,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUERIES, KEYS, True,
    )  # fmt: skip
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    place = out_ptr + row[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head * HEAD_DIM + dim[None, :]
    tl.store(place, result, mask=inside)


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    *,
    tiles: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    config: PrefillConfig,
) -> None:
    """Writes the rows of some requests in ``out`` [num_tokens, num_heads * head_dim].

    ``tiles`` [num_tiles, 2]: (request, first query) for every ``config.queries`` queries. Request r's queries are the
    rows ``query_starts[r] ...`` of ``q`` [num_tokens, num_heads, head_dim]; ``block_tables`` [num_requests,
    max_blocks]. All of them int32.
    """
    check_layer(kv)
    (block_size, num_kv_heads, head_dim), num_heads = kv.shape[2:], q.shape[1]
    assert q[0].is_contiguous(), "a token's queries lie together"
    assert out.is_contiguous(), "the kernel writes whole rows"
    assert tiles.is_contiguous(), "a tile is a pair of numbers"
    prefill_kernel[(len(tiles), num_heads)](
        q, kv, tiles, query_starts, query_lens, kv_lens, block_tables, out,
        q.stride(0), kv.stride(0), block_tables.stride(0), head_dim**-0.5 * LOG2_E,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        QUERIES=config.queries, KEYS=config.keys, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
