"""Full-precision weights in the panels of the native kernels, which few and many rows read alike.

A product here is the same to the last bit whatever other rows stand beside it (see ``kernels/native/gemm.h``).
"""

import torch
from torch import Tensor

from nanoserve.model.kernels.native import Library, memory
from nanoserve.model.kernels.native.stack import LinearWeight

_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}


class NativeLinear:
    """A packed weight [out_features, in_features]. Also serves its rows, so a tied embedding needs no copy."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None) -> None:
        name = _NAMES[weight.dtype]
        self._shape = weight.shape
        self._multiply = library.bind(f"ns_linear_{name}", "plppplll" + "l")
        self._gather = library.bind(f"ns_gather_{name}", "plppl")
        self._bias = bias
        self.weight_bytes: int = library.bind(f"ns_{name}_bytes", "ll")(*weight.shape)
        self._packed = memory.zeros((self.weight_bytes // weight.itemsize,), weight.dtype)
        pack = library.bind(f"ns_pack_{name}", "plpll")
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        pack(weight.data_ptr(), weight.stride(0), self._packed.data_ptr(), *weight.shape)

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.dtype in _NAMES

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == self._packed.dtype, f"input is {x.dtype}, the weight {self._packed.dtype}"
        out_features, in_features = self._shape
        assert x.shape[1] == in_features, f"input is {tuple(x.shape)}, the weight {tuple(self._shape)}"
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(x.shape[0], out_features, dtype=x.dtype)
        bias = None if self._bias is None else self._bias.data_ptr()
        self._multiply(
            x.data_ptr(), x.stride(0), self._packed.data_ptr(), bias, y.data_ptr(), out_features, x.shape[0],
            out_features, in_features,
        )  # fmt: skip
        return y

    def described(self) -> LinearWeight:
        """For a native call that multiplies by this weight; it must not outlive this object."""
        bias = None if self._bias is None else self._bias.data_ptr()
        return LinearWeight(kind=0, n=self._shape[0], k=self._shape[1], packed=self._packed.data_ptr(), bias=bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [num_rows] of the weight -> [num_rows, in_features]."""
        out_features, in_features = self._shape
        assert not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < out_features), "a row outside the weight"
        y = torch.empty(len(ids), in_features, dtype=self._packed.dtype)
        self._gather(ids.contiguous().data_ptr(), len(ids), self._packed.data_ptr(), y.data_ptr(), in_features)
        return y
