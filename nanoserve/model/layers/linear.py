"""Linear layers whose weight is allocated first, filled by the loader, then handed to its method for good."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from nanoserve.model.layers.embedding import Embedding
from nanoserve.model.quant.base import LinearMethod, PreparedLinear
from nanoserve.model.share import WHOLE, Share
from nanoserve.model.slots import Slot, Slots

NOT_CUT: Mapping[str, Share] = MappingProxyType({})


class Linear:
    """One or several projections of the same input, stacked by rows into one product.

    ``parts`` maps a checkpoint's projection name to its number of output features, in order; a single projection has
    one part. On a rank of several, ``rows`` says which share of a projection's outputs it holds (sizes are the rank's
    own), ``columns`` which share of the inputs: its outputs then are addends, and the first rank adds the bias.

    Between construction and :meth:`prepare` the loader fills :meth:`slots`; afterwards the layer is callable.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        method: LinearMethod,
        rows: Mapping[str, Share] = NOT_CUT,
        columns: Share = WHOLE,
    ) -> None:
        out_features = sum(parts.values())
        self._rows, self._columns = rows, columns
        self._parts = dict(parts)
        self._method = method
        self._weight: Tensor | None = torch.empty(out_features, in_features, dtype=dtype)
        self._bias = torch.empty(out_features, dtype=dtype) if bias else None
        self._embedding: Embedding | None = None
        self._prepared: PreparedLinear

    def slots(self, prefix: str) -> Slots:
        """Checkpoint names and the memory they fill: ``{prefix}{part}.weight`` and ``.bias``."""
        assert self._weight is not None, "the weight was already handed to its method"
        sizes = list(self._parts.values())
        weights = zip(self._parts, self._weight.split(sizes), strict=True)
        slots = {f"{prefix}{part}.weight": self._slot(part, view) for part, view in weights}
        if self._bias is not None:
            biases = zip(self._parts, self._bias.split(sizes), strict=True)
            slots |= {f"{prefix}{part}.bias": Slot.of(view, 0, self._rows.get(part, WHOLE)) for part, view in biases}
        return slots

    def _slot(self, part: str, memory: Tensor) -> Slot:
        if self._columns.count > 1:
            return Slot.of(memory, 1, self._columns)
        return Slot.of(memory, 0, self._rows.get(part, WHOLE))

    def share(self, embedding: Embedding) -> None:
        """Uses the table of a tied embedding, which after :meth:`prepare` reads it back from here where that works."""
        self._weight, self._embedding = embedding.weight, embedding

    def prepare(self) -> None:
        """Hands the loaded weight to the method and forgets it."""
        assert self._weight is not None, "prepared twice"
        if self._bias is not None and self._columns.index:
            self._bias.zero_()
        self._prepared = self._method.prepare(self._weight, self._bias)
        self._weight = None
        if self._embedding is not None and self._prepared.rows is not None:
            self._embedding.serve_from(self._prepared.rows)

    @property
    def prepared(self) -> PreparedLinear:
        """The weight in its final form, after :meth:`prepare`."""
        return self._prepared

    @property
    def weight_bytes(self) -> int:
        return self._prepared.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        return self._prepared(x)
