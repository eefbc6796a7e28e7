"""Quantized weights cost the demo model next to no right answers."""

from typing import Any

import pytest

from demo.evaluate import FOLDER, EngineGenerate, evaluate, held_out
from demo.tokenizer import load_tokenizer
from nanoserve.model.kernels.native import library, why_not

_ITEMS = 25  # a task and mode: 450 answers, so that one of them is a quarter of a point


@pytest.fixture(scope="module")
def share() -> Any:
    tokenizer, items = load_tokenizer(FOLDER), held_out(1000, _ITEMS)

    def right(quantization: str) -> float:
        generate = EngineGenerate(FOLDER, dtype="float32", sample=False, seed=0, quantization=quantization)
        outcomes = evaluate(generate, tokenizer, items)
        generate.llm.shutdown()
        return 100 * sum(outcome.right for outcome in outcomes) / len(outcomes)

    return right


@pytest.mark.slow
def test_int8_loses_at_most_one_point_and_int4_three(share: Any) -> None:
    if library() is None:
        pytest.skip(why_not())
    full = share("none")
    assert full > 90
    assert share("int8") >= full - 1
    assert share("int4") >= full - 3
