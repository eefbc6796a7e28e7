"""Paged attention in Triton (``kernels/triton``): one launch for all requests of one token, one for all others.

Norms, rotation and the store of keys and values are one launch before them. A step's integers reach the device in one
transfer. Nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoserve.model.attention.base import AttentionSpec, ForwardBatch, HeadNorms, IntArray, PlainLayout
from nanoserve.model.kernels.triton import why_not

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_GROUP = 16
_INTERPRETED = (90, 2)  # architecture and number of multiprocessors that the interpreter stands for


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """Requests of one token: their rows in the step, [num_requests] int32 each, and their blocks.

    ``are_all``: the rows are those of the step, in order.
    """

    are_all: bool
    rows: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    num_splits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefills:
    """Requests of several tokens; int32, and as a kernel of either library wants them.

    The queries are those from ``rows[0]`` to before ``rows[1]`` of the step; ``query_ends`` and ``kv_ends``
    [num_requests + 1] count them and their contexts up from 0. ``are_fresh``: none has a computed prefix.
    """

    rows: tuple[int, int]
    tiles: Tensor
    query_starts: Tensor
    query_lens: Tensor
    kv_lens: Tensor
    query_ends: Tensor
    kv_ends: Tensor
    block_tables: Tensor
    max_query_len: int
    max_kv_len: int
    are_fresh: bool


@dataclass(frozen=True, slots=True)
class Metadata:
    """A step on the device. ``slots`` [num_tokens] int32, below 0 where a row is padding."""

    slots: Tensor
    decodes: Decodes | None
    prefills: tuple[Prefills, ...]


class TritonAttention(PlainLayout):
    """KV of one layer: [num_blocks, 2, block_size, num_kv_heads, head_dim], a strided view of the pool."""

    name = "triton"

    def __init__(self, spec: AttentionSpec) -> None:
        from nanoserve.model.kernels.triton.decode import decode_config
        from nanoserve.model.kernels.triton.prefill import prefill_config

        self._spec = spec
        self._decode_config = decode_config(spec.head_dim, spec.dtype.itemsize)
        arch, self._num_sms = _INTERPRETED
        if spec.device.type == "cuda":
            properties = torch.cuda.get_device_properties(spec.device)
            arch, self._num_sms = 10 * properties.major + properties.minor, properties.multi_processor_count
        self._prefill_config = prefill_config(spec.head_dim, spec.dtype.itemsize, arch)

    @staticmethod
    def reject(spec: AttentionSpec) -> str | None:
        if (reason := why_not(spec.device)) is not None:
            return reason
        if spec.dtype not in _DTYPES:
            return f"it computes in float32, bfloat16 and float16, not {spec.dtype}"
        if spec.kv_cache_dtype != "auto":
            return "it keeps KV in the model's dtype only"
        if spec.head_dim < 16 or spec.head_dim > 256 or spec.head_dim & (spec.head_dim - 1):
            return f"the head size must be a power of two from 16 to 256, not {spec.head_dim}"
        group = spec.num_heads // spec.num_kv_heads
        return None if group <= _MAX_GROUP else f"a KV head may serve at most {_MAX_GROUP} query heads, not {group}"

    def prepare(self, batch: ForwardBatch) -> Metadata:
        slots = batch.slot_blocks.numpy() * self._spec.block_size + batch.slot_offsets.numpy()
        starts = batch.query_lens.cumsum() - batch.query_lens
        single = np.flatnonzero(batch.query_lens == 1)
        arrays = [slots, starts[single], batch.kv_lens[single], batch.block_tables[single]]
        runs = _runs(batch.query_lens)
        for run in runs:
            arrays += self._prefill_arrays(batch, starts, run)
        slots_on_device, rows, kv_lens, tables, *rest = on_device(arrays, self._spec.device)
        decodes = None
        if len(single):
            decodes = Decodes(
                are_all=len(single) == len(slots), rows=rows, kv_lens=kv_lens, block_tables=tables,
                num_splits=self._splits(len(single)),
            )  # fmt: skip
        prefills = [
            self._prefills(batch, starts, run, rest[7 * i : 7 * i + 7]) for i, run in enumerate(runs)
        ]  # fmt: skip
        return Metadata(slots_on_device, decodes, tuple(prefills))

    def _splits(self, num_requests: int) -> int:
        from nanoserve.model.kernels.triton.decode import decode_splits

        return decode_splits(num_requests, self._spec.num_kv_heads, self._num_sms)

    def _prefill_arrays(self, batch: ForwardBatch, starts: IntArray, run: slice) -> list[IntArray]:
        query_lens = batch.query_lens[run]
        step = self._prefill_config.queries
        counts = -(-query_lens // step)
        requests = np.repeat(np.arange(len(query_lens)), counts)
        first = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * step
        # The longest contexts first: what starts last should end soon.
        order = np.argsort(-(batch.kv_lens[run][requests] - query_lens[requests] + first), kind="stable")
        tiles = np.stack((requests, first), axis=1)[order]
        kv_lens = batch.kv_lens[run]
        query_ends, kv_ends = (np.concatenate(([0], lens.cumsum())) for lens in (query_lens, kv_lens))
        return [tiles, starts[run], query_lens, kv_lens, query_ends, kv_ends, batch.block_tables[run]]

    def _prefills(self, batch: ForwardBatch, starts: IntArray, run: slice, tensors: Sequence[Tensor]) -> Prefills:
        tiles, query_starts, query_lens, kv_lens, query_ends, kv_ends, tables = tensors
        first = int(starts[run.start])
        return Prefills(
            rows=(first, first + int(batch.query_lens[run].sum())),
            tiles=tiles,
            query_starts=query_starts,
            query_lens=query_lens,
            kv_lens=kv_lens,
            query_ends=query_ends,
            kv_ends=kv_ends,
            block_tables=tables,
            max_query_len=int(batch.query_lens[run].max()),
            max_kv_len=int(batch.kv_lens[run].max()),
            are_fresh=bool((batch.query_lens[run] == batch.kv_lens[run]).all()),
        )

    def prepare_decode(self, positions: Tensor, block_tables: Tensor) -> Metadata:
        """One token of each row at ``positions`` [num_rows], all on the device; below 0 a row is padding.

        Everything here has sizes that depend on the number of rows alone, so a graph can hold it.
        """
        size = self._spec.block_size
        place = positions.clamp(min=0)
        blocks = block_tables.gather(1, (place // size)[:, None])[:, 0]
        slots = torch.where(positions < 0, -1, blocks * size + place % size).to(torch.int32)
        decodes = Decodes(
            are_all=True,
            rows=torch.arange(len(positions), dtype=torch.int32, device=positions.device),
            kv_lens=(positions + 1).to(torch.int32),
            block_tables=block_tables,
            num_splits=self._splits(len(positions)),
        )
        return Metadata(slots, decodes, ())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, metadata: Metadata) -> Tensor:
        from nanoserve.model.kernels.triton.store import store_kv

        store_kv(k, v, kv, metadata.slots)
        return self.attend(q, k, v, kv, metadata)

    def forward_merged(
        self, qkv: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, kv: Tensor, metadata: Metadata
    ) -> Tensor:
        from nanoserve.model.kernels.triton.store import prepare_heads

        q, k = prepare_heads(qkv, norms.q, norms.k, norms.eps, cos, sin, kv, metadata.slots)
        v = qkv.view(len(qkv), -1, self._spec.head_dim)[:, -self._spec.num_kv_heads :]
        return self.attend(q, k, v, kv, metadata)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, metadata: Metadata) -> Tensor:
        """Attention after the store. ``k``, ``v``: the step's own, which the pool holds too."""
        out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if metadata.decodes is not None:
            self.decode(q, kv, out, metadata.decodes)
        for prefills in metadata.prefills:
            self.prefill(q, k, v, kv, out, prefills)
        return out

    def decode(self, q: Tensor, kv: Tensor, out: Tensor, decodes: Decodes) -> None:
        """Writes the rows of ``decodes`` in ``out``."""
        from nanoserve.model.kernels.triton.decode import paged_decode

        paged_decode(
            q, kv, out, rows=decodes.rows, block_tables=decodes.block_tables, kv_lens=decodes.kv_lens,
            num_splits=decodes.num_splits, config=self._decode_config,
        )  # fmt: skip

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, out: Tensor, prefills: Prefills) -> None:
        """Writes the rows of ``prefills`` in ``out``."""
        from nanoserve.model.kernels.triton.prefill import paged_prefill

        paged_prefill(
            q, kv, out, tiles=prefills.tiles, query_starts=prefills.query_starts, query_lens=prefills.query_lens,
            kv_lens=prefills.kv_lens, block_tables=prefills.block_tables, config=self._prefill_config,
        )  # fmt: skip


def _runs(query_lens: IntArray) -> list[slice]:
    """Neighbours that compute several tokens each: their rows lie together, which FlashAttention wants."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], query_lens > 1, [False])).astype(np.int8)))
    return [slice(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def on_device(arrays: Sequence[IntArray], device: torch.device) -> list[Tensor]:
    """int32 copies with the shapes of ``arrays``, in one transfer; each begins on a boundary of 16 bytes."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    parts = staged.numpy()
    start = 0
    for array, size in zip(arrays, sizes, strict=True):
        parts[start : start + array.size] = array.reshape(-1)
        start += size
    moved = staged.to(device, non_blocking=True).split(sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(moved, arrays, strict=True)]
