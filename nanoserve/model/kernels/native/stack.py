"""All dense decoder layers of a step in one native call (``stack.h``), where every part of every layer is native."""

import ctypes
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nanoserve.core.errors import ShardLostError
from nanoserve.model.kernels.base import LayerParts, Stack
from nanoserve.model.kernels.native import memory
from nanoserve.model.kernels.native.dispatch import Library
from nanoserve.model.parallel import Collective

# A call shows no sign of life before it returns, and the engine's health check wants one every few seconds.
_MOST_ROWS_OF_ONE_CALL = 64


class LinearWeight(ctypes.Structure):
    """``LinearWeight`` of ``stack.h``. Whoever makes it keeps the memory alive."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class _LayerWeights(ctypes.Structure):
    _fields_ = tuple((name, LinearWeight) for name in ("qkv", "o", "gate_up", "down")) + tuple(
        (name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")
    )


_BUFFERS = ("normed", "delta", "qkv", "attended", "gate_up", "inner")


class _Buffers(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _BUFFERS)


@runtime_checkable
class NativeWeight(Protocol):
    """A prepared linear layer that the kernels can multiply by themselves."""

    def described(self) -> LinearWeight: ...


@runtime_checkable
class NativeShape(Protocol):
    """An attention backend that the kernels can run by themselves."""

    @property
    def shape_address(self) -> int: ...


class _NativeMetadata(Protocol):
    @property
    def address(self) -> int: ...


class NativeStack:
    """Owns the memory that the layers of a step share."""

    def __init__(
        self,
        library: Library,
        layers: Sequence[LayerParts],
        weights: Sequence[_LayerWeights],
        shape: int,
        ranks: int | None,
    ) -> None:
        """``shape`` and ``ranks``: addresses of ``AttentionShape`` and, on one rank of several, ``Ranks``."""
        self._run = library.bind("ns_run_stack", "ppplll" + "fpppplpp")
        self._ranks = ranks
        self._layers = tuple(layers)  # keeps what the addresses point to alive
        self._weights = (_LayerWeights * len(weights))(*weights)
        self._shape = shape
        first = weights[0]
        self._sizes = (first.o.n, first.o.n, first.qkv.n, first.o.k, first.gate_up.n, first.down.k)
        self._memory = torch.empty(0)
        self._buffers = _Buffers()

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_layers: Iterable[Tensor], metadata: _NativeMetadata
    ) -> Tensor:
        """Runs ``x`` [num_tokens, hidden_size] through all layers in place; many rows layer by layer."""
        assert x.is_contiguous(), "the sum is written in place"
        self._reserve(x)
        weights, count, eps = ctypes.addressof(self._weights), len(self._weights), self._layers[0].eps
        buffers = ctypes.addressof(self._buffers)
        at_once = 1 if len(x) > _MOST_ROWS_OF_ONE_CALL else count
        layers, first = iter(kv_layers), 0
        while part := tuple(islice(layers, at_once)):
            kv = part[0]  # the layers of a block lie one after another
            start = kv.data_ptr() - first * kv.shape[1] * kv.itemsize
            have_parted = self._run(
                self._shape, metadata.address, weights, first, first + len(part), count, eps, x.data_ptr(),
                cos.data_ptr(), sin.data_ptr(), start, kv.shape[1] * kv.itemsize, buffers,
                self._ranks,
            )  # fmt: skip
            if have_parted:
                raise ShardLostError("The ranks of this engine have parted.")
            first += len(part)
        return x

    def _reserve(self, x: Tensor) -> None:
        """Lays the buffers out for this many rows, each on its own cache line."""
        sizes = [-(-len(x) * size * x.itemsize // 64) * 64 for size in self._sizes]
        if self._memory.nbytes < sum(sizes):
            self._memory = memory.zeros((sum(sizes),), torch.uint8)
        address = self._memory.data_ptr()
        for name, size in zip(_BUFFERS, sizes, strict=True):
            setattr(self._buffers, name, address)
            address += size


def fuse(library: Library, layers: Sequence[LayerParts], backend: object, collective: Collective) -> Stack | None:
    """The layers as one call; None where a part of one is not native."""
    ranks = collective.native_address
    if not layers or not isinstance(backend, NativeShape) or (ranks is None and collective.size > 1):
        return None
    weights = [_layer_weights(layer) for layer in layers]
    native = [layer for layer in weights if layer is not None]
    are_all = len(native) == len(layers)
    return NativeStack(library, layers, native, backend.shape_address, ranks) if are_all else None


def _layer_weights(layer: LayerParts) -> _LayerWeights | None:
    linears = [linear for linear in (layer.qkv, layer.o, layer.gate_up, layer.down) if isinstance(linear, NativeWeight)]
    if len(linears) < 4:
        return None
    norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    return _LayerWeights(*(linear.described() for linear in linears), *(norm.data_ptr() for norm in norms))
