"""Paged attention in the native kernels (``kernels/native/attention.h``): one call a layer for any mix of requests.

A row's result depends on its query and its keys alone, to the last bit: chunk sizes, batch mates and the number of
threads change nothing.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.model.attention.base import AttentionSpec, ForwardBatch, HeadNorms, IntArray
from nanoserve.model.kernels.native import Library, library, why_not

_SUB_BLOCK = 16  # tokens
_MAX_HEAD_DIM = 512


class _Shape(ctypes.Structure):
    """``AttentionShape`` of ``kernels/native/kv.h``."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "is_bf16", "is_int8", "block_stride")
    )


class _Batch(ctypes.Structure):
    """``AttentionBatch`` of ``kernels/native/kv.h``."""

    _fields_ = (
        ("num_requests", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("slot_blocks", ctypes.c_void_p),
        ("slot_offsets", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class _Metadata:
    """A step for the kernels; ``arrays`` keep what ``batch`` points to alive."""

    batch: _Batch
    address: int
    arrays: tuple[IntArray | Tensor, ...]


class NativeAttention:
    """KV of one layer: [num_blocks, bytes or elements of a block], a strided view of the pool."""

    name = "native"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._is_int8 = spec.kv_cache_dtype == "int8"
        self.kv_dtype = torch.uint8 if self._is_int8 else spec.dtype
        self._shape = _Shape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size,
            spec.dtype == torch.bfloat16, self._is_int8, 0,
        )  # fmt: skip
        self.shape_address = ctypes.addressof(self._shape)
        kernels = _kernels()
        self._store = kernels.bind("ns_store_kv", "ppplplp")
        self._attend = kernels.bind("ns_attention", "ppplpp")
        self._attend_merged = kernels.bind("ns_attend_qkv", "pppppfpppp")

    @staticmethod
    def reject(spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"the device is {spec.device.type}, not cpu"
        if spec.dtype not in (torch.float32, torch.bfloat16):
            return f"it computes in float32 and bfloat16, not {spec.dtype}"
        if spec.block_size % _SUB_BLOCK:
            return f"the block size must be a multiple of {_SUB_BLOCK}, not {spec.block_size}"
        if spec.head_dim % _SUB_BLOCK or spec.head_dim > _MAX_HEAD_DIM:
            return f"the head size must be a multiple of {_SUB_BLOCK} up to {_MAX_HEAD_DIM}, not {spec.head_dim}"
        return why_not() if library() is None else None

    def kv_shape(self, *, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        spec = self._spec
        scale_bytes = 4 if self._is_int8 else 0  # an int8 element is a byte
        return (num_blocks, num_layers, 2 * spec.num_kv_heads * spec.block_size * (spec.head_dim + scale_bytes))

    def layer(self, pool: Tensor, index: int) -> Tensor:
        self._shape.block_stride = pool.stride(0) * pool.itemsize
        return pool[:, index]

    def prepare(self, batch: ForwardBatch) -> _Metadata:
        query_starts = batch.query_lens.cumsum() - batch.query_lens
        tables = batch.block_tables
        described = _Batch(
            len(batch.query_lens), len(batch.token_ids), query_starts.ctypes.data, batch.query_lens.ctypes.data,
            batch.kv_lens.ctypes.data, tables.ctypes.data, tables.strides[0] // tables.itemsize,
            batch.slot_blocks.data_ptr(), batch.slot_offsets.data_ptr(),
        )  # fmt: skip
        arrays = (query_starts, batch.query_lens, batch.kv_lens, tables, batch.slot_blocks, batch.slot_offsets)
        return _Metadata(described, ctypes.addressof(described), arrays)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, metadata: _Metadata) -> Tensor:
        q, k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v))
        out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype)
        shape, batch, layer = self.shape_address, metadata.address, kv.data_ptr()
        self._store(shape, batch, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), layer)
        self._attend(shape, batch, q.data_ptr(), q.stride(0), layer, out.data_ptr())
        return out

    def forward_merged(
        self, qkv: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, kv: Tensor, metadata: _Metadata
    ) -> Tensor:
        assert qkv.is_contiguous(), "the kernel reads whole rows"
        out = torch.empty(len(qkv), self._spec.num_heads * self._spec.head_dim, dtype=qkv.dtype)
        self._attend_merged(
            self.shape_address, metadata.address, qkv.data_ptr(), norms.q.data_ptr(), norms.k.data_ptr(), norms.eps,
            cos.data_ptr(), sin.data_ptr(), kv.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


def _kernels() -> Library:
    kernels = library()
    assert kernels is not None, "a rejected backend was built"
    return kernels
