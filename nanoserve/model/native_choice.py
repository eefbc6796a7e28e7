"""The rule of ``choice.py`` by the native kernels: one pass over each row, and never a sort of the vocabulary."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.model.choice import Settings
from nanoserve.model.kernels.native import Library
from nanoserve.model.sampling_table import IntArray

_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}


class NativeChoice:
    """Tokens of a batch from its logits [num_rows, vocab_size], bfloat16 or float32."""

    def __init__(self, library: Library) -> None:
        self._choose = {dtype: library.bind(f"ns_choose_{name}", "plllpppppp") for dtype, name in _NAMES.items()}

    def __call__(self, logits: Tensor, settings: Settings) -> IntArray:
        assert logits.stride(1) == 1
        tokens = np.empty(logits.shape[0], dtype=np.int64)
        self._choose[logits.dtype](
            logits.data_ptr(), logits.stride(0), *logits.shape,
            _address(settings.temperature, np.float64), _address(settings.top_k, np.int64),
            _address(settings.top_p, np.float64), _address(settings.log_min_p, np.float64),
            _address(settings.uniform, np.float64), _address(tokens, np.int64),
        )  # fmt: skip
        return tokens


def _address(values: np.ndarray[Any, Any], dtype: type) -> int:
    assert values.dtype == dtype
    assert values.flags.c_contiguous
    return values.ctypes.data
