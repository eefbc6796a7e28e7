"""What the card gives, and what the kernels make of it."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.place import REHEARSES, device, median_s, size
from nanoserve.model.attention import choose_backend
from nanoserve.model.attention.base import AttentionSpec, ForwardBatch
from nanoserve.model.attention.triton import Decodes, TritonAttention
from nanoserve.model.kernels.triton.blocks import copy_blocks
from nanoserve.model.kernels.triton.choose import SettingsTable, choose_tokens
from nanoserve.model.kernels.triton.decode import DecodeConfig, decode_config, paged_decode

_HEADS, _KV_HEADS, _HEAD_DIM = 16, 8, 128  # Qwen3-0.6B's


def copy_bytes_per_s() -> float:
    """Bytes read and written a second by a copy within the card."""
    source = torch.zeros(size(8 << 30, 1 << 20), dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s([lambda: target.copy_(source)], 10)


def ceilings() -> dict[str, object]:
    """The card's name, copy and product rates, and those of the bus."""
    n = size(8192, 64)
    a, b = (torch.randn(n, n, device=device()).bfloat16() for _ in range(2))
    flops = 2 * n**3 / median_s([lambda: a @ b], 20)
    name = "rehearsal" if REHEARSES else torch.cuda.get_device_name()
    return {"card": name, "copy_GB/s": copy_bytes_per_s() / 1e9, "bf16_TFLOP/s": flops / 1e12, **_bus()}


def _bus() -> dict[str, float]:
    host = torch.zeros(size(1 << 30, 1 << 16), dtype=torch.uint8, pin_memory=not REHEARSES)
    there = torch.zeros_like(host, device=device())
    to_card = host.nbytes / median_s([lambda: there.copy_(host, non_blocking=True)], 5)
    to_host = host.nbytes / median_s([lambda: host.copy_(there, non_blocking=True)], 5)
    return {"host_to_device_GB/s": to_card / 1e9, "device_to_host_GB/s": to_host / 1e9}


def copies() -> dict[str, object]:
    """Blocks of a 0.6B pool (16 tokens, all layers) between card and pinned memory, and within the card."""
    shape = (size(512, 8), size(28, 2), 2, 16, _KV_HEADS, _HEAD_DIM)
    pool = torch.zeros(shape, dtype=torch.bfloat16, device=device())
    host = torch.zeros(shape, dtype=torch.bfloat16, pin_memory=not REHEARSES)
    order = np.random.default_rng(0).permutation(shape[0]).tolist()
    scattered = list(zip(order, reversed(order), strict=True))[: shape[0] // 2]
    half = pool.nbytes / 2
    ways = {
        "device_to_host": (partial(copy_blocks, pool, host, scattered), half),
        "host_to_device": (partial(copy_blocks, host, pool, scattered), half),
        "device_to_device": (partial(copy_blocks, pool, torch.zeros_like(pool), scattered), 2 * half),
    }
    bus = _bus()
    figures = {f"{name}_GB/s": num_bytes / median_s([call], 10) / 1e9 for name, (call, num_bytes) in ways.items()}
    shares = {f"{name}_share_of_bus": figures[f"{name}_GB/s"] / bus[f"{name}_GB/s"] for name in list(ways)[:2]}
    return {**figures, **shares, "share_of_copy": figures["device_to_device_GB/s"] * 1e9 / copy_bytes_per_s()}


def attention() -> dict[str, object]:
    """Decode as a share of the copy rate over settings, prefill's operations a second, and the sampler."""
    bandwidth = copy_bytes_per_s()
    decodes: dict[str, dict[str, float]] = {}
    for batch, length in ((1, 4096), (8, 2048), (64, 1024), (256, 600)) if not REHEARSES else ((2, 20),):
        for block_size in (16, 64, 256) if not REHEARSES else (16,):
            decodes[f"B {batch} L {length} block {block_size}"] = _decode(batch, length, block_size, bandwidth)
    return {"decode_share_of_copy": decodes, "prefill_TFLOP/s": _prefill(), "choose_us": _choose()}


def _decode(batch: int, length: int, block_size: int, bandwidth: float) -> dict[str, float]:
    """Shares by setting; enough layers in turn that no cache holds their keys."""
    spec = _spec(block_size)
    per_request = -(-length // block_size)
    layer_bytes = 2 * batch * length * _KV_HEADS * _HEAD_DIM * 2
    num_layers = max(2, min(28, size(400 << 20, 1) // layer_bytes + 1))
    pool = torch.zeros(
        batch * per_request, num_layers, 2, block_size, _KV_HEADS, _HEAD_DIM, dtype=spec.dtype, device=device()
    )
    q = torch.randn(batch, _HEADS, _HEAD_DIM, device=device()).to(spec.dtype)
    out = torch.empty(batch, _HEADS * _HEAD_DIM, dtype=spec.dtype, device=device())
    tables = torch.randperm(batch * per_request, device=device(), dtype=torch.int32).view(batch, per_request)
    decodes = Decodes(
        are_all=True,
        rows=torch.arange(batch, dtype=torch.int32, device=device()),
        kv_lens=torch.full((batch,), length, dtype=torch.int32, device=device()),
        block_tables=tables,
        num_splits=TritonAttention(spec)._splits(batch),
    )
    shares = {}
    for config, splits in _settings(decodes.num_splits):
        calls = [partial(_decode_once, q, pool[:, i], out, decodes, config, splits) for i in range(num_layers)]
        name = f"keys {config.keys} warps {config.num_warps} stages {config.num_stages} splits {splits}"
        shares[name] = layer_bytes / median_s(calls) / bandwidth
    chosen = next(iter(shares.items()))
    best = max(shares.items(), key=lambda item: item[1])
    return {"as committed": chosen[1], f"best ({best[0]})": best[1]}


def _decode_once(q: Tensor, kv: Tensor, out: Tensor, decodes: Decodes, config: DecodeConfig, num_splits: int) -> None:
    paged_decode(
        q, kv, out, rows=decodes.rows, block_tables=decodes.block_tables, kv_lens=decodes.kv_lens,
        num_splits=num_splits, config=config,
    )  # fmt: skip


def _settings(num_splits: int) -> list[tuple[DecodeConfig, int]]:
    """What is committed first, then its neighbours."""
    committed = decode_config(_HEAD_DIM, 2)
    others = [DecodeConfig(keys, warps, stages) for keys in (64, 128) for warps in (4, 8) for stages in (2, 3)]
    splits = sorted({max(1, num_splits // 2), min(32, num_splits * 2)} - {num_splits})
    more = [] if REHEARSES else [(config, num_splits) for config in others] + [(committed, count) for count in splits]
    return [(committed, num_splits), *more]


def _spec(block_size: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads=_HEADS, num_kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, block_size=block_size, dtype=torch.bfloat16,
        device=device(),
    )  # fmt: skip


def _prefill() -> dict[str, float]:
    """By the Triton kernels, and by what "auto" chooses."""
    figures = {}
    for batch, length in ((1, 4096), (16, 1024)) if not REHEARSES else ((1, 20),):
        for name in ("triton", "auto"):
            spec = _spec(256)
            backend, _ = choose_backend("triton" if REHEARSES else name, spec)
            per_request = -(-length // 256)
            pool = torch.zeros(
                backend.kv_shape(num_layers=1, num_blocks=batch * per_request), dtype=spec.dtype, device=device()
            )
            step = _prefill_batch(batch, length, per_request)
            q, k, v = (
                torch.randn(batch * length, heads, _HEAD_DIM, device=device()).to(spec.dtype)
                for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
            )
            metadata = backend.prepare(step)
            layer = backend.layer(pool, 0)
            seconds = median_s([partial(backend.forward, q, k, v, layer, metadata)])
            operations = 2 * batch * length * length * _HEADS * _HEAD_DIM  # two products, half of each masked
            figures[f"{batch} x {length} {backend.name}"] = operations / seconds / 1e12
    return figures


def _prefill_batch(batch: int, length: int, per_request: int) -> ForwardBatch:
    tables = np.arange(batch * per_request).reshape(batch, per_request)
    lens = np.full(batch, length)
    return ForwardBatch.trial(lens, lens, tables, 256)


def _choose() -> dict[str, float]:
    """Microseconds for the tokens of a batch over the whole vocabulary."""
    figures = {}
    for count in (1, size(64, 2), size(256, 3)):
        logits = (torch.randn(count, size(151_936, 1500), device=device()) * 2).bfloat16()
        for name, (temperature, top_k, top_p) in {
            "greedy": (0.0, 0, 1.0), "unfiltered": (0.6, 0, 1.0), "top-k 20, top-p 0.95": (0.6, 20, 0.95),
            "top-p 0.95": (1.0, 0, 0.95),
        }.items():  # fmt: skip
            table = SettingsTable(
                temperature=torch.full((count,), temperature, dtype=torch.float64, device=device()),
                top_k=torch.full((count,), top_k, device=device()),
                top_p=torch.full((count,), top_p, dtype=torch.float64, device=device()),
                log_min_p=torch.full((count,), -torch.inf, dtype=torch.float64, device=device()),
                seed=torch.arange(count, device=device()),
            )
            rows = torch.arange(count, device=device())
            figures[f"{count} rows {name}"] = median_s([partial(choose_tokens, logits, rows, rows, table)]) * 1e6
    return figures
