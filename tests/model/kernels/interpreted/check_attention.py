"""Paged attention and the stores into the pool against float64 over gathered blocks."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve.model.attention.reference import dense_attention
from nanoserve.model.kernels import plain
from nanoserve.model.kernels.triton.decode import DecodeConfig, decode_splits, paged_decode
from nanoserve.model.kernels.triton.prefill import PrefillConfig, paged_prefill
from nanoserve.model.kernels.triton.store import prepare_heads, store_kv
from tests.model.kernels.interpreted.close import DTYPES, assert_close, random

NUM_KV_HEADS, HEAD_DIM = 2, 32


def layer(num_blocks: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """Layer 1 of a pool of two, full of garbage: nothing beyond a request's length may be read."""
    pool = torch.full((num_blocks, 2, 2, block_size, NUM_KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)
    return pool[:, 1]


def filled(kv: Tensor, lengths: list[int], dtype: torch.dtype) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Block tables (int32), and the keys and values that were written for each request."""
    block_size = kv.shape[2]
    order = iter(np.random.default_rng(0).permutation(len(kv)).tolist())
    tables = torch.full((len(lengths), max(1, -(-max(lengths) // block_size))), -1, dtype=torch.int32)
    contexts = []
    for i, length in enumerate(lengths):
        k, v = (random(length, NUM_KV_HEADS, HEAD_DIM, dtype=dtype, seed=10 * i + part) for part in range(2))
        for first in range(0, length, block_size):
            block = next(order)
            tables[i, first // block_size] = block
            count = min(block_size, length - first)
            kv[block, 0, :count], kv[block, 1, :count] = k[first : first + count], v[first : first + count]
        contexts.append((k, v))
    return tables, contexts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode(dtype: torch.dtype, block_size: int, num_splits: int) -> None:
    lengths = [1, 40, 0, 67]
    kv = layer(40, block_size, dtype)
    tables, contexts = filled(kv, lengths, dtype)
    q = random(6, 4, HEAD_DIM, dtype=dtype)
    rows = torch.tensor([4, 0, 1, 3], dtype=torch.int32)
    out = torch.full((6, 4 * HEAD_DIM), 7.0, dtype=dtype)
    paged_decode(
        q, kv, out, rows=rows, block_tables=tables, kv_lens=torch.tensor(lengths, dtype=torch.int32),
        num_splits=num_splits, config=DecodeConfig(32, 4, 2),
    )  # fmt: skip
    for row, length, (k, v) in zip(rows.tolist(), lengths, contexts, strict=True):
        if length:
            exact = dense_attention(q[row][None].double(), k.double(), v.double()).flatten()
            assert_close(out[row], exact, dtype)
        else:
            assert not out[row].any()
    assert (out[[2, 5]] == 7).all()


def test_a_group_of_eight_query_heads() -> None:
    kv = layer(4, 16, torch.float32)
    tables, [(k, v)] = filled(kv, [33], torch.float32)
    q, out = random(1, 16, HEAD_DIM), torch.empty(1, 16 * HEAD_DIM)
    paged_decode(
        q, kv, out, rows=torch.zeros(1, dtype=torch.int32), block_tables=tables,
        kv_lens=torch.tensor([33], dtype=torch.int32), num_splits=1, config=DecodeConfig(16, 4, 2),
    )  # fmt: skip
    assert_close(out, dense_attention(q.double(), k.double(), v.double()).flatten(1), torch.float32)


def test_splits_fill_the_device_and_stay_within_bounds() -> None:
    assert decode_splits(1, 8, 132) == 32
    assert decode_splits(64, 8, 132) == 2
    assert decode_splits(4096, 8, 132) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_prefill(dtype: torch.dtype, block_size: int) -> None:
    query_lens, kv_lens = [1, 20, 33, 5], [1, 20, 70, 65]
    kv = layer(50, block_size, dtype)
    tables, contexts = filled(kv, kv_lens, dtype)
    starts = np.cumsum(query_lens) - query_lens
    tiles = [(i, first) for i, count in enumerate(query_lens) for first in range(0, count, 16)]
    q = random(sum(query_lens), 4, HEAD_DIM, dtype=dtype)
    out = torch.empty(len(q), 4 * HEAD_DIM, dtype=dtype)
    paged_prefill(
        q, kv, out, tiles=torch.tensor(tiles, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32), query_lens=torch.tensor(query_lens, dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32), block_tables=tables, config=PrefillConfig(16, 16, 4, 2),
    )  # fmt: skip
    parts = zip(q.double().split(query_lens), contexts, strict=True)
    exact = [dense_attention(queries, k.double(), v.double()) for queries, (k, v) in parts]
    assert_close(out, torch.cat(exact).flatten(1), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_store(dtype: torch.dtype) -> None:
    kv = layer(3, 4, dtype)
    before = kv.clone()
    qkv = random(4, 3, 3 * NUM_KV_HEADS, HEAD_DIM, dtype=dtype)[:, 0]  # rows with a gap between them
    k, v = qkv[:, 2:4], qkv[:, 4:6]
    slots = torch.tensor([9, -1, 0, 7], dtype=torch.int32)
    store_kv(k, v, kv, slots)
    for token, (block, offset) in {0: (2, 1), 2: (0, 0), 3: (1, 3)}.items():
        assert torch.equal(kv[block, 0, offset], k[token])
        assert torch.equal(kv[block, 1, offset], v[token])
        before[block, :, offset] = kv[block, :, offset]
    assert torch.equal(kv.nan_to_num(9), before.nan_to_num(9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [2, 6])
def test_prepare_heads(dtype: torch.dtype, num_heads: int) -> None:
    kv = layer(2, 4, dtype)
    qkv = random(3, (num_heads + 2 * NUM_KV_HEADS) * HEAD_DIM, dtype=dtype)
    q_weight, k_weight = random(HEAD_DIM, dtype=dtype), random(HEAD_DIM, dtype=dtype, seed=1)
    cos, sin = random(3, 1, HEAD_DIM, dtype=dtype, seed=2), random(3, 1, HEAD_DIM, dtype=dtype, seed=3)
    slots = torch.tensor([5, -1, 2], dtype=torch.int32)
    q, k = prepare_heads(qkv, q_weight, k_weight, 1e-6, cos, sin, kv, slots)
    heads = qkv.double().view(3, -1, HEAD_DIM)
    weight = torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(NUM_KV_HEADS, -1))).double()
    exact = plain.qk_norm_rope(heads[:, : num_heads + NUM_KV_HEADS], weight, 1e-6, cos.double(), sin.double())
    assert_close(q, exact[:, :num_heads], dtype)
    assert_close(k, exact[:, num_heads:], dtype)
    for token, (block, offset) in {0: (1, 1), 2: (0, 2)}.items():
        assert_close(kv[block, 0, offset], exact[token, num_heads:], dtype)
        assert torch.equal(kv[block, 1, offset], qkv.view(3, -1, HEAD_DIM)[token, num_heads + NUM_KV_HEADS :])
    assert int(kv.isnan().sum()) == kv.numel() - 2 * 2 * NUM_KV_HEADS * HEAD_DIM
