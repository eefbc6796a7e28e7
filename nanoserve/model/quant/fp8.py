"""8-bit floating weights times 8-bit floating activations, by torch's scaled product (Hopper's tensor cores; any CPU).

``w = q * scale[column]`` with q in e4m3 and ``scale = max |w| / 448`` for each output, made while weights load; rows of
activations likewise as they come (Micikevicius et al. 2022, "FP8 formats for deep learning"). Experts of a mixture keep
full precision, and so do sizes that are no multiple of 16, which the product wants.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.model.quant.base import PreparedLinear
from nanoserve.model.quant.experts import PreparedExperts
from nanoserve.model.quant.none import NoQuantization

_MULTIPLE = 16
_LARGEST = 448.0
_ROWS_AT_ONCE = 4096  # of a weight while it is quantized
_LEAST_CAPABILITY = (8, 9)


class Float8Weights:
    """The method behind ``--quantization fp8``."""

    name = "fp8"

    def prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        fits = all(size % _MULTIPLE == 0 for size in weight.shape)
        return Float8Linear(weight, bias) if fits else NoQuantization().prepare(weight, bias)

    def prepare_experts(self, weight: Tensor) -> PreparedExperts:
        return NoQuantization().prepare_experts(weight)


class Float8Linear:
    """A quantized weight [out_features, in_features]; also serves its rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        parts = [quantize(part) for part in weight.split(_ROWS_AT_ONCE)]
        self._weight = torch.cat([values for values, _ in parts])
        self._scales = torch.cat([scales for _, scales in parts])
        self._bias, self._dtype = bias, weight.dtype
        self.weight_bytes = self._weight.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = quantize(x)
        y = torch._scaled_mm(
            values, self._weight.T, scale_a=scales, scale_b=self._scales.T.contiguous(), out_dtype=torch.bfloat16
        )
        return y.to(self._dtype) if self._bias is None else y.to(self._dtype) + self._bias

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [num_rows] of the weight, as their 8 bits say -> [num_rows, in_features]."""
        picked = functional.embedding(ids, self._weight.view(torch.int8)).view(torch.float8_e4m3fn)
        return (picked.float() * self._scales[ids]).to(self._dtype)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """[num_rows, size] -> e4m3 values of that shape and float32 scales [num_rows, 1]."""
    wide = x.float()
    scales = (wide.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp(min=1e-30)
    return (wide / scales).to(torch.float8_e4m3fn), scales


def why_not(device: torch.device) -> str | None:
    """Why ``device`` cannot multiply 8-bit floats; None when it can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "this GPU has no 8-bit tensor cores"
    return None
