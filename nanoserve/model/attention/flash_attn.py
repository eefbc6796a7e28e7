"""FlashAttention (Dao 2023; Shah et al. 2024) where it is installed, for each phase for which it is the fastest here.

Phases are prefill (no computed prefix), prefix (some), and decode. For each of them every installed version that can
read this pool is run on a small random batch: one that disagrees with the Triton kernels is refused, and the fastest of
the rest, those kernels included, is taken. Each choice is logged with the reasons against the others.

Versions, by what they are imported as: ``flash_attn`` (2; reads pools of blocks of a multiple of 256 tokens only),
``flash_attn_interface`` (3, for Hopper; any block size), ``flash_attn.cute`` (4; cannot split a context on Hopper, so
not for decode).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.model.attention.base import AttentionSpec, ForwardBatch
from nanoserve.model.attention.triton import Decodes, Prefills, TritonAttention

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_TOLERANCE = 2e-2  # relative norm of the difference of two 16-bit results
_REPEATS = 5

Prefill = Callable[[Tensor, Tensor, Tensor, Tensor, Prefills], Tensor]
"""(queries, keys, values of the run, the layer's pool, the run) -> [num_queries, num_heads, head_dim]."""
Decode = Callable[[Tensor, Tensor, Decodes], Tensor]
"""(queries [num_requests, num_heads, head_dim], the layer's pool, the requests) -> the shape of the queries."""


class Version2:
    """``flash_attn`` 2.x."""

    def __init__(self, spec: AttentionSpec) -> None:
        module = import_module("flash_attn")
        self._varlen, self._with_cache = module.flash_attn_varlen_func, module.flash_attn_with_kvcache
        self._scale = spec.head_dim**-0.5
        self.prefill: Prefill = self._prefill
        reads_pool = spec.block_size % 256 == 0
        self.prefix: Prefill | None = self._prefix if reads_pool else None
        self.decode: Decode | None = self._decode if reads_pool else None
        self.reason = f"it reads blocks of a multiple of 256 tokens, not of {spec.block_size}"

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, run: Prefills) -> Tensor:
        ends, longest = run.query_ends, run.max_query_len
        return self._varlen(q, k, v, ends, ends, longest, longest, softmax_scale=self._scale, causal=True)

    def _prefix(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, run: Prefills) -> Tensor:
        return self._varlen(
            q, kv[:, 0], kv[:, 1], run.query_ends, run.kv_ends, run.max_query_len, run.max_kv_len,
            softmax_scale=self._scale, causal=True, block_table=run.block_tables,
        )  # fmt: skip

    def _decode(self, q: Tensor, kv: Tensor, requests: Decodes) -> Tensor:
        out: Tensor = self._with_cache(
            q[:, None], kv[:, 0], kv[:, 1], cache_seqlens=requests.kv_lens, block_table=requests.block_tables,
            softmax_scale=self._scale, causal=True,
        )  # fmt: skip
        return out[:, 0]


class Version3:
    """``flash_attn_interface``, built from ``hopper/`` of the project's repository."""

    def __init__(self, spec: AttentionSpec) -> None:
        module = import_module("flash_attn_interface")
        self._varlen, self._with_cache = module.flash_attn_varlen_func, module.flash_attn_with_kvcache
        self._scale = spec.head_dim**-0.5
        self.prefill: Prefill = self._prefill
        self.prefix: Prefill | None = self._prefix
        self.decode: Decode | None = self._decode
        self.reason = ""

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, run: Prefills) -> Tensor:
        ends, longest = run.query_ends, run.max_query_len
        return _output(self._varlen(q, k, v, ends, ends, longest, longest, softmax_scale=self._scale, causal=True))

    def _prefix(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, run: Prefills) -> Tensor:
        return _output(
            self._with_cache(
                q, kv[:, 0], kv[:, 1], cache_seqlens=run.kv_lens, page_table=run.block_tables,
                cu_seqlens_q=run.query_ends, max_seqlen_q=run.max_query_len, softmax_scale=self._scale, causal=True,
            )
        )  # fmt: skip

    def _decode(self, q: Tensor, kv: Tensor, requests: Decodes) -> Tensor:
        out = self._with_cache(
            q[:, None], kv[:, 0], kv[:, 1], cache_seqlens=requests.kv_lens, page_table=requests.block_tables,
            softmax_scale=self._scale, causal=True,
        )  # fmt: skip
        return _output(out)[:, 0]


class Version4:
    """``flash_attn.cute``, compiled when it is first called."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._varlen = import_module("flash_attn.cute").flash_attn_varlen_func
        self._scale = spec.head_dim**-0.5
        self.prefill: Prefill = self._prefill
        self.prefix: Prefill | None = self._prefix
        self.decode: Decode | None = None
        self.reason = "it cannot split a context on Hopper"

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, run: Prefills) -> Tensor:
        ends = run.query_ends
        out = self._varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, softmax_scale=self._scale, causal=True)
        return _output(out)

    def _prefix(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, run: Prefills) -> Tensor:
        return _output(
            self._varlen(
                q, kv[:, 0], kv[:, 1], cu_seqlens_q=run.query_ends, seqused_k=run.kv_lens,
                page_table=run.block_tables, softmax_scale=self._scale, causal=True,
            )
        )  # fmt: skip


VERSIONS: dict[str, tuple[str, type[Version2] | type[Version3] | type[Version4]]] = {
    "flash-attn 3": ("flash_attn_interface", Version3),
    "flash-attn 4": ("flash_attn.cute", Version4),
    "flash-attn 2": ("flash_attn", Version2),
}


class FlashAttention(TritonAttention):
    """The pool, the store and whatever FlashAttention does not do best are those of the Triton backend.

    ``num_calls`` counts (phase, version) for whoever wants to see that a version is really used.
    """

    name = "flash_attn"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.num_calls: Counter[tuple[str, str]] = Counter()
        versions = _importable(spec)
        self._chosen: dict[str, tuple[str, Any]] = {
            phase: self._choose(phase, versions) for phase in ("prefill", "prefix", "decode")
        }

    @staticmethod
    def reject(spec: AttentionSpec) -> str | None:
        if (reason := TritonAttention.reject(spec)) is not None:
            return reason
        if spec.dtype not in _DTYPES:
            return f"it computes in bfloat16 and float16, not {spec.dtype}"
        is_installed = any(_is_installed(module) for module, _ in VERSIONS.values())
        return None if is_installed else "flash-attn is not installed"

    def decode(self, q: Tensor, kv: Tensor, out: Tensor, decodes: Decodes) -> None:
        name, call = self._chosen["decode"]
        self.num_calls["decode", name] += 1
        if call is None:
            super().decode(q, kv, out, decodes)
        elif decodes.are_all:
            out.copy_(call(q, kv, decodes).flatten(1))
        else:
            rows = decodes.rows.long()
            out[rows] = call(q[rows], kv, decodes).flatten(1)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, out: Tensor, prefills: Prefills) -> None:
        phase = "prefill" if prefills.are_fresh else "prefix"
        name, call = self._chosen[phase]
        self.num_calls[phase, name] += 1
        if call is None:
            super().prefill(q, k, v, kv, out, prefills)
        else:
            rows = slice(*prefills.rows)
            out[rows] = call(q[rows], k[rows], v[rows], kv, prefills).flatten(1)

    def _choose(self, phase: str, versions: Mapping[str, Any]) -> tuple[str, Any]:
        """The fastest that agrees with the Triton kernels, by name; None in its place for those kernels."""
        trial = _Trial(self._spec, phase, super())
        times_s = {"triton": trial.seconds(None)}
        against: dict[str, str] = {}
        for name, version in versions.items():
            call = getattr(version, phase)
            reason = version.reason if call is None else trial.why_wrong(call)
            if reason is not None:
                against[name] = reason
            else:
                times_s[name] = trial.seconds(call)
        best = min(times_s, key=lambda name: times_s[name])
        against |= {name: f"{seconds * 1e6:.0f} us" for name, seconds in times_s.items() if name != best}
        others = "; ".join(f"{name}: {reason}" for name, reason in against.items()) or "none"
        logger.info("attention phase=%s by=%s us=%.0f against=%s", phase, best, times_s[best] * 1e6, others)
        return best, None if best == "triton" else getattr(versions[best], phase)


class _Trial:
    """One phase on a random batch over a small pool: 4 requests of up to 1,024 tokens."""

    def __init__(self, spec: AttentionSpec, phase: str, kernels: Any) -> None:
        self._kernels, self._phase, self._device = kernels, phase, spec.device
        batch = _trial_batch(spec, phase)
        metadata = kernels.prepare(batch)
        self._part = metadata.decodes if phase == "decode" else metadata.prefills[0]
        generator = torch.Generator(device=spec.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=spec.device).to(spec.dtype)

        num_blocks = int(batch.block_tables.max()) + 1
        self._kv = random(*kernels.kv_shape(num_layers=1, num_blocks=num_blocks))[:, 0]
        num_tokens = len(batch.token_ids)
        self._q = random(num_tokens, spec.num_heads, spec.head_dim)
        k, v = (random(num_tokens, spec.num_kv_heads, spec.head_dim) for _ in range(2))
        self._kv[batch.slot_blocks, 0, batch.slot_offsets] = k
        self._kv[batch.slot_blocks, 1, batch.slot_offsets] = v
        self._new = k, v
        self._exact = self._by_kernels().float()

    def _by_kernels(self) -> Tensor:
        out = torch.empty(len(self._q), self._q.shape[1] * self._q.shape[2], dtype=self._q.dtype, device=self._device)
        if self._phase == "decode":
            self._kernels.decode(self._q, self._kv, out, self._part)
        else:
            self._kernels.prefill(self._q, *self._new, self._kv, out, self._part)
        return out

    def _run(self, call: Any) -> Tensor:
        if call is None:
            return self._by_kernels()
        if self._phase == "decode":
            return call(self._q, self._kv, self._part)
        return call(self._q, *self._new, self._kv, self._part)

    def why_wrong(self, call: Any) -> str | None:
        """What is wrong with a version, in words; None when it agrees."""
        try:
            result = self._run(call).flatten(1).float()
        except Exception as error:  # it was built for another GPU, torch or CUDA: then it is as good as absent
            return f"it fails here with {type(error).__name__}: {error}"
        error_norm = float((result - self._exact).norm() / self._exact.norm())
        return None if error_norm <= _TOLERANCE else f"it differs from our own kernels by {error_norm:.1e}"

    def seconds(self, call: Any) -> float:
        """The quickest of some runs."""
        return min(_seconds(lambda: self._run(call), self._device) for _ in range(_REPEATS))


def _trial_batch(spec: AttentionSpec, phase: str) -> ForwardBatch:
    kv_lens = np.array([1024, 517, 300, 33]) if spec.device.type == "cuda" else np.array([40, 21, 9, 2])
    query_lens = {"prefill": kv_lens, "prefix": -(-kv_lens // 2) + 1, "decode": np.ones_like(kv_lens)}[phase]
    query_lens = np.minimum(query_lens, kv_lens)
    num_blocks = -(-kv_lens // spec.block_size)
    tables = np.zeros((len(kv_lens), int(num_blocks.max())), dtype=np.int64)
    order = iter(np.random.default_rng(0).permutation(num_blocks.sum()).tolist())
    for row, count in zip(tables, num_blocks, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    return ForwardBatch.trial(query_lens, kv_lens, tables, spec.block_size)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _importable(spec: AttentionSpec) -> dict[str, Version2 | Version3 | Version4]:
    """What is installed and can be imported: a release for another torch, or the bare package of 4, cannot."""
    versions: dict[str, Version2 | Version3 | Version4] = {}
    for name, (module, adapter) in VERSIONS.items():
        if _is_installed(module):
            try:
                versions[name] = adapter(spec)
            except (ImportError, AttributeError, OSError) as error:
                logger.info("%s cannot be used: %s", name, error)
    return versions


def _output(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some releases give the sums of the softmax too."""
    return result[0] if isinstance(result, tuple) else result


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
