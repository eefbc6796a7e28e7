"""Where a checkpoint's tensors go: memory that a network allocated, whole or for the share that its rank holds."""

from dataclasses import dataclass

from torch import Tensor

from nanoserve.model.share import Share


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory for a tensor, or for those of its entries along ``axis`` that begin at ``start``.

    ``whole``: how many entries the stored tensor has along ``axis``; None: just those.
    """

    memory: Tensor
    axis: int = 0
    start: int = 0
    whole: int | None = None

    @staticmethod
    def of(memory: Tensor, axis: int, share: Share) -> "Slot":
        """Memory that is ``share`` of a tensor along ``axis``."""
        size = memory.shape[axis]
        return Slot(memory, axis, share.index * size, share.count * size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stored tensor."""
        shape = list(self.memory.shape)
        if self.whole is not None:
            shape[self.axis] = self.whole
        return tuple(shape)

    @property
    def where(self) -> tuple[slice, ...] | None:
        """The entries to read; None: all."""
        if self.whole is None or self.whole == self.memory.shape[self.axis]:
            return None
        ranges = [slice(0, size) for size in self.memory.shape]
        ranges[self.axis] = slice(self.start, self.start + self.memory.shape[self.axis])
        return tuple(ranges)


Slots = dict[str, Slot]
