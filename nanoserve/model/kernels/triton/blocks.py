"""Copies of whole blocks of the pool: within a device, and between a device and pinned memory of the host.

A pool's first axis is the block, and a block of all layers lies together. Large blocks of which one side is the host's
go by the copy engine, runs of neighbours in one transfer; everything else goes through a kernel, many at once, which
reads and writes pinned memory directly.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # words of one program
_LEAST_BYTES_OF_A_TRANSFER = 64 << 10  # below this a transfer's start costs more than its bytes


@triton.jit
def copy_kernel(source_ptr, target_ptr, pairs_ptr, source_stride, target_stride, words, CHUNK: tl.constexpr):
    """Grid (pair, chunk): words of block ``pairs[i, 0]`` to block ``pairs[i, 1]``."""
    pair, chunk = tl.program_id(0), tl.program_id(1)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    word = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = word < words
    value = tl.load(source_ptr + source * source_stride + word, mask=inside, other=0)
    tl.store(target_ptr + target * target_stride + word, value, mask=inside)


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies block ``pairs[i][0]`` of ``source`` to block ``pairs[i][1]`` of ``target``; both may be one pool.

    No copy may read what another writes. On a device it runs in stream order: memory of the host must be pinned, and
    is not ready when this returns.

    Raises:
        IndexError: a block lies outside its pool.
    """
    if not pairs:
        return
    for source_id, target_id in pairs:
        if not (0 <= source_id < len(source) and 0 <= target_id < len(target)):
            raise IndexError(f"block {source_id} of {len(source)} to {target_id} of {len(target)}")
    assert source.shape[1:] == target.shape[1:], f"blocks of {tuple(source.shape[1:])} and {tuple(target.shape[1:])}"
    assert source.dtype == target.dtype, f"{source.dtype} and {target.dtype}"
    crosses = source.device != target.device
    if crosses and source[0].nbytes >= _LEAST_BYTES_OF_A_TRANSFER:
        for first, to, count in runs(pairs):
            target[to : to + count].copy_(source[first : first + count], non_blocking=True)
    else:
        _copy_in_kernel(source, target, pairs)


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of neighbours that are copied to neighbours."""
    start = 0
    for i in range(1, len(pairs) + 1):
        is_next = i < len(pairs) and (pairs[i][0] - pairs[i - 1][0], pairs[i][1] - pairs[i - 1][1]) == (1, 1)
        if not is_next:
            yield (*pairs[start], i - start)
            start = i


def _copy_in_kernel(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    from_words, to_words = _words(source), _words(target)
    words = from_words.shape[1]
    device = target.device if source.device.type == "cpu" else source.device
    table = torch.tensor(pairs, dtype=torch.int32).to(device)
    copy_kernel[(len(pairs), triton.cdiv(words, _CHUNK))](
        from_words, to_words, table, from_words.stride(0), to_words.stride(0), words, CHUNK=_CHUNK, num_warps=8
    )


def _words(pool: Tensor) -> Tensor:
    """[num_blocks, words of 4 bytes], or bytes where a block is no multiple of 4."""
    assert pool[0].is_contiguous(), "a block lies together"
    flat = pool.flatten(1)
    word = torch.int32 if flat.shape[1] * flat.itemsize % 4 == 0 else torch.uint8
    return flat.view(word)
