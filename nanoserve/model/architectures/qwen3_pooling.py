"""Qwen3 checkpoints that do not generate: the bare network (embeddings), and a score head in place of the vocabulary.

``Qwen3Model`` is what sentence-transformers exports: names without ``model.``, and no head. A classifier's one label is
the difference of the "yes" and "no" rows of the reranker that it was converted from.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from nanoserve.model.architectures.qwen3 import Qwen3ForCausalLM
from nanoserve.model.config import ModelConfig
from nanoserve.model.layers.linear import Linear
from nanoserve.model.layers.norm import RMSNorm
from nanoserve.model.quant import linear_method
from nanoserve.model.slots import Slots


class _Headless:
    """The network up to its last hidden state. ``settings``: those of ``Qwen3ForCausalLM``."""

    def __init__(self, config: ModelConfig, **settings: Any) -> None:
        # Tied, so that the vocabulary head, which nobody calls, takes no memory.
        self._body = Qwen3ForCausalLM(replace(config, tie_word_embeddings=True), **settings)

    @property
    def norm(self) -> RMSNorm:
        return self._body.norm

    def prepare(self) -> None:
        for layer in self._body.layers:
            layer.prepare()
        self._body.fuse()

    def forward(self, token_ids: Tensor, positions: Tensor, kv_layers: Sequence[Tensor], metadata: object) -> Tensor:
        """As ``Qwen3ForCausalLM.forward``."""
        return self._body.forward(token_ids, positions, kv_layers, metadata)


class Qwen3Model(_Headless):
    """Embeddings only."""

    def slots(self) -> Slots:
        return {name.removeprefix("model."): slot for name, slot in self._body.slots().items()}

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("a network without a head was asked for logits")


class Qwen3ForSequenceClassification(_Headless):
    """One score a text: ``logits`` are [num_rows, 1]."""

    def __init__(self, config: ModelConfig, **settings: Any) -> None:
        super().__init__(config, **settings)
        method = linear_method("none")  # one row; the packed forms want many
        self._score = Linear(config.hidden_size, {"score": 1}, bias=False, dtype=settings["dtype"], method=method)

    def slots(self) -> Slots:
        return self._body.slots() | self._score.slots("")

    def prepare(self) -> None:
        super().prepare()
        self._score.prepare()

    def logits(self, hidden: Tensor) -> Tensor:
        return self._score(self.norm(hidden))
