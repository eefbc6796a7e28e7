"""8- and 4-bit weights times 8-bit activations, made from full-precision weights while they are loaded.

The meaning, which :class:`IntegerLinear` writes in torch and the native kernels compute several times faster:

- activations: ``x = q * scale[row]`` with ``scale = max |x| / 127``, for each row (token) as it comes;
- int8: ``w = q * scale[column]`` with ``scale = max |w| / 127`` for each output column;
- int4: groups of 32 inputs; ``w = (q - 8) * m[column, group] * scale[column]`` with q in 0 ... 15 and an integer m,
  |m| <= 15 (two-level scales: VS-Quant, Dai et al. 2021; integer ones as in QServe, Lin et al. 2024).

Products of such integers are summed exactly, so a result depends on neither the batch nor the CPU.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.model.kernels.native import Library, library, memory
from nanoserve.model.kernels.native.stack import LinearWeight
from nanoserve.model.quant.base import PreparedLinear
from nanoserve.model.quant.experts import PreparedExperts, SeparateExperts, check_rows

GROUP = 32
_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}
_ROWS_AT_ONCE = 4096  # of a weight while it is quantized in torch: 16 MB of float32 a thousand inputs


class IntegerWeights:
    """The method behind ``--quantization int8`` and ``int4``."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self.name = f"int{bits}"

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        native = library()
        if native is not None and weight.device.type == "cpu" and weight.dtype in _NAMES:
            return NativeIntegerLinear(native, self._bits, weight, bias)
        return IntegerLinear(self._bits, weight, bias)

    def prepare_experts(self, weight: Tensor) -> PreparedExperts:
        native = library()
        if native is not None and weight.device.type == "cpu" and weight.dtype in _NAMES:
            return NativeIntegerExperts(native, self._bits, weight)
        return SeparateExperts([IntegerLinear(self._bits, part, None) for part in weight])


class NativeIntegerLinear:
    """A quantized weight in the panels of ``kernels/native/integer.h``; also serves its rows."""

    def __init__(self, native: Library, bits: int, weight: Tensor, bias: Tensor | None) -> None:
        name = f"int{bits}_{_NAMES[weight.dtype]}"
        out_features, in_features = self._shape = weight.shape
        padded = native.bind("ns_padded", "l")(out_features)
        self._multiply = native.bind(f"ns_linear_{name}", "plpppppl" + "lll")
        self._gather = native.bind(f"ns_gather_{name}", "plpppl")
        self._bits, self._bias, self._dtype = bits, bias, weight.dtype
        self._packed = memory.zeros((native.bind(f"ns_int{bits}_bytes", "ll")(*weight.shape),), torch.uint8)
        self._scales = torch.empty(padded, dtype=torch.float32)
        self._sums = torch.empty(padded, dtype=torch.int32)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        native.bind(f"ns_pack_{name}", "plpppll")(
            weight.data_ptr(), weight.stride(0), self._packed.data_ptr(), self._scales.data_ptr(),
            self._sums.data_ptr(), out_features, in_features,
        )  # fmt: skip
        self.weight_bytes: int = self._packed.nbytes + self._scales.nbytes + self._sums.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == self._dtype, f"input is {x.dtype}, the weight was {self._dtype}"
        out_features, in_features = self._shape
        assert x.shape[1] == in_features, f"input is {tuple(x.shape)}, the weight {tuple(self._shape)}"
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(x.shape[0], out_features, dtype=x.dtype)
        bias = None if self._bias is None else self._bias.data_ptr()
        self._multiply(
            x.data_ptr(), x.stride(0), self._packed.data_ptr(), self._scales.data_ptr(), self._sums.data_ptr(), bias,
            y.data_ptr(), out_features, x.shape[0], out_features, in_features,
        )  # fmt: skip
        return y

    def described(self) -> LinearWeight:
        """For a native call that multiplies by this weight; it must not outlive this object."""
        return LinearWeight(
            kind=self._bits,
            n=self._shape[0],
            k=self._shape[1],
            packed=self._packed.data_ptr(),
            scales=self._scales.data_ptr(),
            sums=self._sums.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [num_rows] of the weight, as their integers say -> [num_rows, in_features]."""
        out_features, in_features = self._shape
        assert not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < out_features), "a row outside the weight"
        y = torch.empty(len(ids), in_features, dtype=self._dtype)
        packed, scales = self._packed.data_ptr(), self._scales.data_ptr()
        self._gather(ids.contiguous().data_ptr(), len(ids), packed, scales, y.data_ptr(), in_features)
        return y


class NativeIntegerExperts:
    """The quantized weights of all experts, multiplied in one call (``kernels/native/experts.h``)."""

    def __init__(self, native: Library, bits: int, weight: Tensor) -> None:
        name = f"int{bits}_{_NAMES[weight.dtype]}"
        count, out_features, in_features = self._shape = weight.shape
        padded = native.bind("ns_padded", "l")(out_features)
        self._multiply = native.bind(f"ns_experts_{name}", "pppppplll")
        self._dtype = weight.dtype
        num_bytes = native.bind(f"ns_int{bits}_bytes", "ll")(out_features, in_features)
        self._packed = memory.zeros((count, num_bytes), torch.uint8)
        self._scales = torch.empty(count, padded, dtype=torch.float32)
        self._sums = torch.empty(count, padded, dtype=torch.int32)
        pack = native.bind(f"ns_pack_{name}", "plpppll")
        for expert, packed, scales, sums in zip(weight, self._packed, self._scales, self._sums, strict=True):
            pack(
                expert.contiguous().data_ptr(), in_features, packed.data_ptr(), scales.data_ptr(), sums.data_ptr(),
                out_features, in_features,
            )  # fmt: skip
        self.weight_bytes: int = self._packed.nbytes + self._scales.nbytes + self._sums.nbytes

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        rows, y = check_rows(rows, ends, self._shape, self._dtype)
        self._multiply(
            rows.data_ptr(), self._packed.data_ptr(), self._scales.data_ptr(), self._sums.data_ptr(), y.data_ptr(),
            ends.data_ptr(), *self._shape,
        )  # fmt: skip
        return y


class IntegerLinear:
    """The same in torch: the reference, and the way without native kernels. Holds a byte a weight, for 4 bits too."""

    def __init__(self, bits: int, weight: Tensor, bias: Tensor | None) -> None:
        quantize = _int8_weight if bits == 8 else _int4_weight
        parts = [quantize(part.float()) for part in weight.split(_ROWS_AT_ONCE)]
        self._weight = torch.cat([values for values, _ in parts])
        self._scales = torch.cat([scales for _, scales in parts])
        self._bias, self._dtype = bias, weight.dtype
        self.weight_bytes = self._weight.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = quantize_rows(x)
        # float64 sums of these integers are exact; the integer product of torch wants shapes that nobody promised.
        sums = torch.cat([values.double() @ part.double().T for part in self._weight.split(_ROWS_AT_ONCE)], dim=1)
        y = sums.float() * (scales[:, None] * self._scales)
        return (y if self._bias is None else y + self._bias.float()).to(self._dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [num_rows] of the weight, as their integers say -> [num_rows, in_features]."""
        return (functional.embedding(ids, self._weight) * self._scales[ids, None]).to(self._dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[num_rows, size] -> int8 values of that shape and float32 scales [num_rows]; NaN where a row is not finite."""
    most = x.float().abs().amax(dim=1)
    most = torch.where(torch.isfinite(most), most, torch.nan)
    inverse = 127 / most
    inverse = torch.where(torch.isfinite(inverse), inverse, 0)
    values = (x.nan_to_num(0, 0, 0).double() * inverse[:, None].double()).round()
    return values.to(torch.int8), torch.where((inverse == 0) & ~most.isnan(), 0, most / 127)


def _int8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(weight)


def _int4_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n, k] -> int8 (q - 8) * m [n, k] and float32 scales [n]: of the m around the ideal one, the best."""
    size = weight.shape[1]
    groups = functional.pad(weight, (0, -size % GROUP)).unflatten(1, (-1, GROUP))
    unit = weight.abs().amax(dim=1) / (8 * 15)
    unit = torch.where(unit > 1e-36, unit, torch.where(torch.isfinite(unit), 0, torch.nan))
    most = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    ideal = torch.where(unit[:, None, None] > 0, most / (-8 * unit[:, None, None]), 1)
    best, least = torch.zeros_like(groups), torch.full_like(most, torch.inf)
    for change in (-2, -1, 0, 1):
        m = (ideal.abs().round() + change).clamp(1, 15) * torch.where(ideal < 0, -1, 1)
        step = m * unit[:, None, None]
        inverse = torch.where(unit[:, None, None] > 0, 1 / step, 0)
        q = (groups.double() * inverse.double()).round().clamp(-8, 7).float()  # float64: one rounding, as with an FMA
        error = (groups - q * step).square().sum(dim=2, keepdim=True)
        is_better = error < least
        best, least = torch.where(is_better, q * m, best), torch.where(is_better, error, least)
    return best.flatten(1)[:, :size].to(torch.int8), unit
