"""The matrix product of all kernels here."""

import triton
import triton.language as tl

from nanoserve.model.kernels.triton import is_interpreted

_INTERPRET = tl.constexpr(is_interpreted())


@triton.jit
def dot(a, b, acc):
    """``a @ b + acc``, ``acc`` in float32. float32 operands are not cut to TF32.

    The interpreter holds bfloat16 as 16-bit integers and would multiply those (triton-lang/triton#11584).
    """
    if _INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:  # noqa: RET505 - a compile-time branch must not leave a second return behind
        return tl.dot(a, b, acc, input_precision="ieee")
