"""Every kernel against float64 on the device itself, in the shapes that Qwen3 uses."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.place import device, size
from nanoserve.model.attention.base import AttentionSpec, ForwardBatch
from nanoserve.model.attention.reference import dense_attention
from nanoserve.model.attention.triton import TritonAttention
from nanoserve.model.blocked_logits import BlockedLogits
from nanoserve.model.choice import Settings, choose
from nanoserve.model.kernels import plain
from nanoserve.model.kernels.triton import rows
from nanoserve.model.kernels.triton.blocks import copy_blocks
from nanoserve.model.kernels.triton.choose import SettingsTable, choose_tokens
from nanoserve.model.kernels.triton.experts import grouped_product
from nanoserve.model.kernels.triton.store import prepare_heads
from nanoserve.model.randomness import uniforms

_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True)
class Step:
    """A paged batch full of NaN outside the contexts, and the exact attention of its queries."""

    batch: ForwardBatch
    pool: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    exact: Tensor


def kernels() -> dict[str, object]:
    """The worst relative error of each kernel; fails where one is beyond its dtype's limit."""
    torch.manual_seed(0)
    errors: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for kernel, check in _CHECKS.items():
            worst = check(dtype)
            errors[f"{kernel} {name}"] = worst
            assert worst <= _LIMITS[dtype], f"{kernel} in {name} is off by {worst:.1e}"
    errors |= {"block copies (bytes that differ)": _block_copies(), "tokens that differ": _tokens()}
    return {"relative_errors": errors}


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device()).to(dtype)


def _error(result: Tensor, exact: Tensor) -> float:
    assert torch.isfinite(result).all(), "a result is not finite"
    return float((result.double() - exact).norm() / exact.norm())


def _norms(dtype: torch.dtype) -> float:
    x, delta, weight = (_random(*shape, dtype=dtype) for shape in ((33, 1024), (33, 1024), (1024,)))
    exact = plain.rms_norm((x.double() + delta.double()).to(dtype).double(), weight.double(), 1e-6)
    return _error(rows.add_rms_norm(x.clone(), delta, weight, 1e-6), exact)


def _silu_and_mul(dtype: torch.dtype) -> float:
    gate_up = _random(17, 2 * 3072, dtype=dtype)
    return _error(rows.silu_and_mul(gate_up), plain.silu_and_mul(gate_up.double()))


def _experts(dtype: torch.dtype) -> float:
    count, inner, hidden = size(128, 4), size(768, 32), size(2048, 48)
    worst = 0.0
    for num_rows in (1, 200, size(20_000, 50)):
        picked = torch.randint(0, count, (num_rows,), device=device()).sort().values
        ends = torch.searchsorted(picked, torch.arange(count, device=device()), right=True, out_int32=True)
        x, weight = _random(num_rows, hidden, dtype=dtype), _random(count, inner, hidden, dtype=dtype)
        result = grouped_product(x, weight, ends)
        sample = torch.randint(0, num_rows, (min(num_rows, 32),)).tolist()
        exact = torch.stack([weight[picked[i]].double() @ x[i].double() for i in sample])
        worst = max(worst, _error(result[sample], exact))
    return worst


def _prepare_heads(dtype: torch.dtype) -> float:
    heads, kv_heads, dim = 16, 8, 128
    kv = torch.zeros(2, 2, 16, kv_heads, dim, dtype=dtype, device=device())
    qkv, cos, sin = (_random(5, *rest, dtype=dtype) for rest in (((heads + 16) * dim,), (1, dim), (1, dim)))
    q_weight, k_weight = _random(dim, dtype=dtype), _random(dim, dtype=dtype)
    slots = torch.tensor([3, 17, -1, 31, 0], dtype=torch.int32, device=device())
    q, k = prepare_heads(qkv, q_weight, k_weight, 1e-6, cos, sin, kv, slots)
    weight = torch.cat((q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1))).double()
    turned = qkv.view(5, -1, dim)[:, : heads + kv_heads].double()
    exact = plain.qk_norm_rope(turned, weight, 1e-6, cos.double(), sin.double())
    assert torch.equal(kv[1, 0, 1], k[1]), "a key is not where its slot says"
    return max(_error(q, exact[:, :heads]), _error(k, exact[:, heads:]))


def _attention(dtype: torch.dtype) -> float:
    """Decodes, prefills and prefixes in one step, for every group and block size in use."""
    worst = 0.0
    for group in (2, size(8, 2)):
        for block_size in (16, size(256, 16)):
            spec = AttentionSpec(
                num_heads=2 * group, num_kv_heads=2, head_dim=size(128, 16), block_size=block_size, dtype=dtype,
                device=device(),
            )  # fmt: skip
            backend = TritonAttention(spec)
            step = random_step(
                spec, [(0, 1), (size(4095, 30), 1), (size(700, 9), 1), (0, size(513, 20)), (size(300, 7), 70)]
            )
            result = backend.forward(step.q, step.k, step.v, step.pool[:, 1], backend.prepare(step.batch))
            worst = max(worst, _error(result, step.exact))
            again = backend.forward(step.q, step.k, step.v, step.pool[:, 1], backend.prepare(step.batch))
            assert torch.equal(result, again), "two runs differ"
    return worst


def random_step(spec: AttentionSpec, lens: list[tuple[int, int]]) -> Step:
    """``lens``: (tokens computed before, tokens computed now)."""
    num_blocks = [-(-(before + now) // spec.block_size) for before, now in lens]
    total = sum(num_blocks)
    where = np.random.default_rng(0).permutation(total)
    pool = torch.full(
        (total, 2, 2, spec.block_size, spec.num_kv_heads, spec.head_dim), torch.nan, dtype=spec.dtype,
        device=spec.device,
    )  # fmt: skip
    tables = np.zeros((len(lens), max(num_blocks)), dtype=np.int64)
    qs, ks, vs, exact = [], [], [], []
    start = 0
    for table, count, (before, now) in zip(tables, num_blocks, lens, strict=True):
        table[:count] = where[start : start + count]
        start += count
        k, v = (_random(before + now, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype) for _ in range(2))
        q = _random(now, spec.num_heads, spec.head_dim, dtype=spec.dtype)
        place = np.arange(before)
        block, offset = torch.from_numpy(table[place // spec.block_size]), torch.from_numpy(place % spec.block_size)
        pool[block, 1, 0, offset], pool[block, 1, 1, offset] = k[:before], v[:before]
        qs.append(q)
        ks.append(k[before:])
        vs.append(v[before:])
        exact.append(dense_attention(q.double(), k.double(), v.double()).flatten(1))
    query_lens = np.array([now for _, now in lens])
    kv_lens = np.array([before + now for before, now in lens])
    batch = ForwardBatch.trial(query_lens, kv_lens, tables, spec.block_size)
    return Step(batch, pool, torch.cat(qs), torch.cat(ks), torch.cat(vs), torch.cat(exact))


def _block_copies() -> float:
    """Within the device, to pinned memory and back."""
    pool = torch.randint(0, 99, (8, 3, 5000), dtype=torch.int32, device=device())
    host = torch.zeros(8, 3, 5000, dtype=torch.int32, pin_memory=pool.is_cuda)
    back = torch.zeros_like(pool)
    copy_blocks(pool, host, [(1, 4), (2, 5), (7, 0)])
    copy_blocks(host, back, [(4, 1), (5, 2), (0, 7)])
    copy_blocks(back, back, [(1, 0)])
    wrong = (back[[1, 2, 7, 0]] != pool[[1, 2, 7, 1]]).sum()
    assert not wrong, "blocks did not arrive"
    return float(wrong)


def _tokens() -> float:
    """Tokens that differ from the rule in torch: rounding may put a few draws on the other side of an edge."""
    vocab, count = size(151_936, 1500), size(64, 8)
    logits = torch.randn(count, vocab, device=device()) * 3
    seeds, positions = np.arange(count).astype(np.uint64), np.arange(count) * 7
    kinds = [(0.0, 0, 1.0, 0.0), (0.6, 20, 0.95, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.05)]
    picked = [kinds[i % len(kinds)] for i in range(count)]
    temperature, top_p = np.array([p[0] for p in picked]), np.array([p[2] for p in picked])
    top_k = np.array([p[1] for p in picked])
    log_min_p = np.array([math.log(p[3]) if p[3] else -math.inf for p in picked])
    settings = Settings(temperature, top_k, top_p, log_min_p, uniforms(seeds, positions))
    exact = choose(BlockedLogits(BlockedLogits.widen(logits.cpu())), settings)
    table = SettingsTable(
        temperature=torch.from_numpy(temperature).to(device()),
        top_k=torch.from_numpy(top_k).to(device()),
        top_p=torch.from_numpy(top_p).to(device()),
        log_min_p=torch.from_numpy(log_min_p).to(device()),
        seed=torch.from_numpy(seeds.view(np.int64)).to(device()),
    )
    rows_of = torch.arange(count, device=device())
    tokens = choose_tokens(logits, rows_of, torch.from_numpy(positions).to(device()), table).cpu().numpy()
    num_wrong = int((tokens != exact).sum())
    assert num_wrong <= count // 16, f"{num_wrong} of {count} tokens differ"
    return float(num_wrong)


_CHECKS: dict[str, Callable[[torch.dtype], float]] = {
    "add and norm": _norms,
    "silu_and_mul": _silu_and_mul,
    "experts": _experts,
    "prepare_heads": _prepare_heads,
    "attention": _attention,
}
