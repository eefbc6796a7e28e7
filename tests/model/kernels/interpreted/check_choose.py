"""The choice of tokens against the rule written for one row with plain loops (``tests/oracles/sampling.py``)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve.core.sampling import SamplingParams
from nanoserve.model.kernels.triton.choose import SettingsTable, choose_tokens
from tests.oracles import sampling as oracle


def table(settings: list[dict[str, Any]], seeds: list[int]) -> SettingsTable:
    """One entry for each of ``settings``."""
    params = [SamplingParams(**given) for given in settings]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return SettingsTable(
        temperature=column([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params]),
        top_p=column([p.top_p for p in params]),
        log_min_p=column([math.log(p.min_p) if p.min_p else -math.inf for p in params]),
        seed=torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)),
    )


def assert_chosen(logits: Tensor, settings: list[dict[str, Any]], seeds: list[int]) -> None:
    """Row i by setting i at position 3 i; a uniform number within rounding of an edge may fall on either side."""
    count = len(settings)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    entries = table([settings[i] for i in order], [seeds[i] for i in order])
    rows = order.argsort().to(torch.int32)
    tokens = choose_tokens(logits, rows, torch.arange(count) * 3, entries).tolist()
    for i, given in enumerate(settings):
        probabilities = oracle.distribution(logits[i].double().numpy(), SamplingParams(**given))
        u = oracle.uniform(seeds[i], 3 * i)
        near = {oracle.pick(probabilities, min(max(u + shift, 0.0), 1 - 1e-9)) for shift in (-1e-6, 0.0, 1e-6)}
        assert tokens[i] in near, f"row {i}: {given}"


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 2.0, "min_p": 0.05, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 100_000},
    {"temperature": 1.0, "top_p": 1e-9},
]


@pytest.mark.parametrize(
    "dtype, vocab_size", [(torch.float32, 7), (torch.float32, 2500), (torch.bfloat16, 2500), (torch.float16, 1024)]
)
def test_every_setting(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(len(SETTINGS), vocab_size, generator=generator) * 3).to(dtype)
    seeds = [2**64 - 1 - i if i % 2 else i for i in range(len(SETTINGS))]
    assert_chosen(logits, SETTINGS, seeds)


def test_ties_are_kept_in_order_of_id() -> None:
    """Only 5 distinct values among 1,100 tokens: every edge falls inside a tie."""
    logits = torch.randint(0, 5, (9, 1100), generator=torch.Generator().manual_seed(0)).float()
    settings = [{"temperature": 1.0, **filters} for filters in ({"top_k": 7}, {"top_p": 0.3}, {"top_k": 300}) * 3]
    assert_chosen(logits, settings, list(range(len(settings))))


def test_masked_logits() -> None:
    logits = torch.full((3, 1100), -torch.inf)
    logits[:, 1050], logits[:, 3] = 2.0, 1.5
    settings = [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 3}]
    assert_chosen(logits, settings, [5, 6, 7])


@pytest.mark.filterwarnings("ignore:invalid value")  # of infinity from infinity
def test_an_infinite_logit_is_taken() -> None:
    logits = torch.zeros(1, 1100)
    logits[0, 1050] = torch.inf
    entries = table([{"temperature": 1.0, "top_p": 0.5}], [1])
    tokens = choose_tokens(logits, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), entries)
    assert tokens.tolist() == [1050]
