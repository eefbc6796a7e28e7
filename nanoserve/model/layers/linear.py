"""Linear layers whose weight is allocated first, filled by the loader, then handed to its method for good."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nanoserve.model.layers.embedding import Embedding
from nanoserve.model.quant.base import LinearMethod, PreparedLinear


class Linear:
    """One or several projections of the same input, stacked by rows into one product.

    ``parts`` maps a checkpoint's projection name to its number of output features, in order; a single projection has
    one part. Between construction and :meth:`prepare` the loader fills :meth:`slots`; afterwards the layer is callable.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype, method: LinearMethod
    ) -> None:
        out_features = sum(parts.values())
        self._parts = dict(parts)
        self._method = method
        self._weight: Tensor | None = torch.empty(out_features, in_features, dtype=dtype)
        self._bias = torch.empty(out_features, dtype=dtype) if bias else None
        self._embedding: Embedding | None = None
        self._prepared: PreparedLinear

    def slots(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names and the memory they fill: ``{prefix}{part}.weight`` and ``.bias``."""
        assert self._weight is not None, "the weight was already handed to its method"
        sizes = list(self._parts.values())
        weights = zip(self._parts, self._weight.split(sizes), strict=True)
        slots = {f"{prefix}{part}.weight": view for part, view in weights}
        if self._bias is not None:
            biases = zip(self._parts, self._bias.split(sizes), strict=True)
            slots |= {f"{prefix}{part}.bias": view for part, view in biases}
        return slots

    def share(self, embedding: Embedding) -> None:
        """Uses the table of a tied embedding, which after :meth:`prepare` reads it back from here where that works."""
        self._weight, self._embedding = embedding.weight, embedding

    def prepare(self) -> None:
        """Hands the loaded weight to the method and forgets it."""
        assert self._weight is not None, "prepared twice"
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
