"""New keys and values into the paged pool, and on the way there the norm and the rotation of query and key heads.

A layer's pool is [num_blocks, 2, block_size, num_kv_heads, head_dim] with any stride between blocks; slot s is token
s % block_size of block s // block_size. A slot below 0 stores nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS_AT_ONCE = 4  # of a token by one program: wide enough loads, and programs enough for one token


@triton.jit
def store_kernel(
    k_ptr, v_ptr, kv_ptr, slots_ptr, k_stride, v_stride, block_stride,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        columns = tl.arange(0, WIDTH)
        inside = columns < SIZE
        place = kv_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * SIZE + columns
        tl.store(place, tl.load(k_ptr + token * k_stride + columns, mask=inside, other=0.0), mask=inside)
        value = tl.load(v_ptr + token * v_stride + columns, mask=inside, other=0.0)
        tl.store(place + BLOCK_SIZE * SIZE, value, mask=inside)


@triton.jit
def prepare_heads_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slots_ptr, rotated_ptr, kv_ptr,
    qkv_stride, angle_stride, block_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Heads [HEADS, HEAD_DIM] of one token: queries and keys go to ``rotated_ptr``, keys and values into the pool."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    other_dim = (dim + HEAD_DIM // 2) % HEAD_DIM
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    inside = head < NUM_HEADS + 2 * NUM_KV_HEADS
    row = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    x = tl.load(row + dim, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(row + other_dim, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / HEAD_DIM + eps)
    weight = tl.where(is_query, tl.load(q_weight_ptr + dim).to(tl.float32), tl.load(k_weight_ptr + dim).to(tl.float32))
    partner_weight = tl.where(
        is_query, tl.load(q_weight_ptr + other_dim).to(tl.float32), tl.load(k_weight_ptr + other_dim).to(tl.float32)
    )
    cos = tl.load(cos_ptr + token * angle_stride + dim).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + dim).to(tl.float32)
    rotated = x * scale * weight * cos + partner * scale * partner_weight * sin
    result = tl.where(is_value, x, rotated).to(rotated_ptr.dtype.element_ty)
    place = rotated_ptr + (token * (NUM_HEADS + NUM_KV_HEADS) + head) * HEAD_DIM + dim
    tl.store(place, result, mask=inside & (is_value == 0))
    slot = tl.load(slots_ptr + token).to(tl.int64)
    stored = head - NUM_HEADS  # keys, then values
    part = tl.where(is_value, BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM, 0)
    kv_head = tl.where(is_value, stored - NUM_KV_HEADS, stored)
    start = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_DIM)
    tl.store(kv_ptr + start + part + kv_head * HEAD_DIM + dim, result, mask=inside & (head >= NUM_HEADS) & (slot >= 0))


def store_kv(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Stores ``k``, ``v`` [num_tokens, num_kv_heads, head_dim] at ``slots`` [num_tokens] of the layer ``kv``."""
    check_layer(kv)
    assert k.shape == v.shape == (len(slots), *kv.shape[3:]), f"{tuple(k.shape)} into {tuple(kv.shape)}"
    assert k[0].is_contiguous(), "a token's keys lie together"
    assert v[0].is_contiguous(), "a token's values lie together"
    size = kv.shape[3] * kv.shape[4]
    width = triton.next_power_of_2(size)
    store_kernel[(len(slots),)](
        k, v, kv, slots, k.stride(0), v.stride(0), kv.stride(0),
        SIZE=size, BLOCK_SIZE=kv.shape[2], WIDTH=width, num_warps=max(1, min(4, width // 256)),
    )  # fmt: skip


def prepare_heads(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Norms and rotates query and key heads and stores keys and values.

    Gives queries [num_tokens, num_heads, head_dim] and keys [num_tokens, num_kv_heads, head_dim], views of one tensor.

    ``qkv`` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; ``cos``, ``sin`` [num_tokens, 1, head_dim], the
    first half of ``sin`` negated.
    """
    check_layer(kv)
    num_tokens, (block_size, num_kv_heads, head_dim) = len(qkv), kv.shape[2:]
    total = qkv.shape[1] // head_dim
    num_heads = total - 2 * num_kv_heads
    assert len(slots) == len(cos) == len(sin) == num_tokens, "slots and angles are of all tokens"
    assert qkv.stride(1) == cos.stride(2) == 1, "rows are read from end to end"
    rotated = torch.empty(num_tokens, num_heads + num_kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    grid = (num_tokens, triton.cdiv(total, _HEADS_AT_ONCE))
    prepare_heads_kernel[grid](
        qkv, q_weight, k_weight, cos, sin, slots, rotated, kv, qkv.stride(0), cos.stride(0), kv.stride(0), eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        HEADS=_HEADS_AT_ONCE, num_warps=1,
    )  # fmt: skip
    return rotated[:, :num_heads], rotated[:, num_heads:]


def check_layer(kv: Tensor) -> None:
    """Kernels address a layer of the pool by its block stride alone."""
    assert kv.dim() == 5, f"a layer of the pool has five axes, not {kv.dim()}"
    assert kv.shape[1] == 2, "keys and values"
    assert kv[0].is_contiguous(), "a block of one layer lies together"
