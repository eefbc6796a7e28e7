"""The native choice of tokens against the torch one, on every level and for vocabularies that need its shortcuts."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve.model.blocked_logits import BlockedLogits
from nanoserve.model.choice import Settings, choose
from nanoserve.model.kernels.native.dispatch import Library
from nanoserve.model.native_choice import NativeChoice

NAN, INF = float("nan"), float("inf")


def settings(rows: int, **given: float) -> Settings:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "log_min_p": -INF} | given
    columns: dict[str, Any] = {
        name: np.full(rows, value, np.int64 if name == "top_k" else np.float64) for name, value in values.items()
    }
    return Settings(**columns, uniform=np.linspace(0, 1, rows, endpoint=False))


def in_torch(logits: Tensor, wanted: Settings) -> list[int]:
    return [int(token) for token in choose(BlockedLogits(BlockedLogits.widen(logits)), wanted)]


@pytest.mark.parametrize("vocab", [1, 129, 20_000])
@pytest.mark.parametrize("spread", [0.0, 0.3, 8.0])
@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0}, {}, {"temperature": 0.4}, {"top_k": 1}, {"top_k": 7}, {"top_k": 150}, {"top_k": 15_000},
        {"top_p": 0.2}, {"top_p": 0.97}, {"temperature": 2.0, "top_p": 0.9}, {"log_min_p": -1.5},
        {"log_min_p": -20.0, "top_p": 0.9}, {"top_k": 9000, "top_p": 0.6}, {"top_k": 300, "log_min_p": -2.0},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_those_of_torch(native: Library, vocab: int, spread: float, given: dict[str, float]) -> None:
    torch.manual_seed(vocab)
    logits, wanted = torch.randn(6, vocab + 3)[:, :vocab] * spread, settings(6, **given)
    for cast in (logits, logits.bfloat16()):
        assert NativeChoice(native)(cast, wanted).tolist() == in_torch(cast, wanted)


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}, {}], ids=str)
def test_rows_that_are_not_finite_are_greedy(native: Library, given: dict[str, float]) -> None:
    logits = torch.zeros(6, 300)
    logits[0] = -INF
    logits[1, 299] = INF
    logits[2, [140, 7]] = NAN
    logits[3] = NAN
    logits[4, :299] = -INF
    logits[5, [200, 100]] = 3.0
    tokens = NativeChoice(native)(logits, settings(6, **given)).tolist()
    assert tokens[:5] == [0, 299, 7, 0, 299]
    assert tokens[5] == 100 or given.get("temperature", 1.0) > 0


def test_no_rows_are_no_work(native: Library) -> None:
    assert NativeChoice(native)(torch.zeros(0, 300), settings(0)).tolist() == []
