"""Stand-ins for the releases of FlashAttention: they refuse what those refuse, and compute by dense attention."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from nanoserve.model.attention.reference import dense_attention


def install(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Makes ``modules`` importable: "flash_attn" (2), "flash_attn_interface" (3), "flash_attn.cute" (4)."""
    made = {"flash_attn": version_2(), "flash_attn_interface": version_3(), "flash_attn.cute": version_4()}
    for name in modules:
        monkeypatch.setitem(sys.modules, name, made[name])
    if "flash_attn.cute" in modules and "flash_attn" not in modules:
        parent = _module("flash_attn")
        parent.__path__ = []
        monkeypatch.setitem(sys.modules, "flash_attn", parent)


def _module(name: str, **functions: object) -> ModuleType:
    from importlib.machinery import ModuleSpec

    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, function in functions.items():
        setattr(module, key, function)
    return module


def _check(q: Tensor, k: Tensor, v: Tensor, *integers: Tensor) -> None:
    """flash_api.cpp of 2.8.3: dtypes, last strides, and int32 for every index."""
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert q.dtype == k.dtype == v.dtype, "query and key must have the same dtype"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.shape[-2] % k.shape[-2] == 0
    for tensor in integers:
        assert tensor.dtype == torch.int32, "index tensors must have dtype int32"
        assert tensor.is_contiguous() or tensor.stride(-1) == 1


def _rows(ends: Tensor) -> list[tuple[int, int]]:
    return list(zip(ends.tolist(), ends.tolist()[1:], strict=False))


def _gathered(cache: Tensor, table: Tensor, length: int) -> Tensor:
    blocks = -(-length // cache.shape[1])
    return cache[table[:blocks].long()].flatten(0, 1)[:length]


def _paged(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, lens: list[int], tables: Tensor) -> Tensor:
    parts = [
        dense_attention(q[a:b], _gathered(k, table, length), _gathered(v, table, length))
        for (a, b), length, table in zip(_rows(ends), lens, tables, strict=True)
    ]
    return torch.cat(parts)


def _dense(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, k_ends: Tensor) -> Tensor:
    rows = zip(_rows(ends), _rows(k_ends), strict=True)
    return torch.cat([dense_attention(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in rows])


def version_2() -> ModuleType:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, *, softmax_scale: float, causal: bool, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert causal
        assert softmax_scale == q.shape[-1] ** -0.5
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max(b - a for a, b in _rows(cu_seqlens_q))
        assert max_seqlen_k == max(b - a for a, b in _rows(cu_seqlens_k))
        if block_table is None:
            return _dense(q, k, v, cu_seqlens_q, cu_seqlens_k)
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        _check(q, k, v, block_table)
        lens = [b - a for a, b in _rows(cu_seqlens_k)]
        return _paged(q, k, v, cu_seqlens_q, lens, block_table)

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor,
        softmax_scale: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        assert causal
        assert softmax_scale == q.shape[-1] ** -0.5
        assert q.dim() == 4, "(batch, seqlen, heads, head_dim)"
        _check(q, k_cache, v_cache, cache_seqlens, block_table)
        assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        ends = torch.arange(len(q) + 1)
        return _paged(q[:, 0], k_cache, v_cache, ends, cache_seqlens.tolist(), block_table)[:, None]

    return _module(
        "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache
    )


def version_3() -> ModuleType:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, *, softmax_scale: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        assert causal
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
        return _dense(q, k, v, cu_seqlens_q, cu_seqlens_k)

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
        softmax_scale: float, causal: bool, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert causal
        _check(q, k_cache, v_cache, cache_seqlens, page_table)
        if cu_seqlens_q is None:
            assert q.dim() == 4
            ends = torch.arange(len(q) + 1)
            out = _paged(q[:, 0], k_cache, v_cache, ends, cache_seqlens.tolist(), page_table)[:, None]
        else:
            assert max_seqlen_q == max(b - a for a, b in _rows(cu_seqlens_q)), "needed with cu_seqlens_q"
            out = _paged(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens.tolist(), page_table)
        return out, torch.empty(0)

    return _module(
        "flash_attn_interface",
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )


def version_4() -> ModuleType:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None, page_table: Tensor | None = None, softmax_scale: float, causal: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert causal
        assert page_table is None or cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        if page_table is not None:
            assert seqused_k is not None
            _check(q, k, v, cu_seqlens_q, seqused_k, page_table)
            return _paged(q, k, v, cu_seqlens_q, seqused_k.tolist(), page_table), None
        assert cu_seqlens_k is not None
        return _dense(q, k, v, cu_seqlens_q, cu_seqlens_k), None

    return _module("flash_attn.cute", flash_attn_varlen_func=flash_attn_varlen_func)
