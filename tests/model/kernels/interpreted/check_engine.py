"""The whole engine on interpreted kernels, to the tokens that transformers has."""

import random
from pathlib import Path
from typing import Any

import pytest

from nanoserve.core.config import EngineArgs
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.core import EngineCore
from nanoserve.model.build import build
from tests import checkpoints
from tests.model.test_runner import MIN_GAP, greedy

NUM_TOKENS = 5


@pytest.mark.parametrize("make", [checkpoints.sens_model, checkpoints.sens_moe_model])
def test_greedy_tokens(make: Any, tmp_path: Path) -> None:
    """Prompts in chunks, mixed steps, steps of single tokens alone, a prefix hit, and too few blocks for all."""
    model = make(seed=1)
    wanted: dict[str, tuple[list[int], list[int]]] = {}
    rng, shared = random.Random(0), [7] * 17
    while len(wanted) < 3:
        prompt = [*shared, *(rng.randrange(512) for _ in range(2))] if wanted else [300, 41, 5]
        tokens, _, gap = greedy(model, prompt, NUM_TOKENS)
        if gap > MIN_GAP:
            wanted[str(len(wanted))] = prompt, tokens
    folder = checkpoints.save(model, tmp_path)
    args = EngineArgs(
        model=str(folder), kv_cache_memory=5 * 16 * 2 * 2 * 32 * 4 * len(model.model.layers), max_num_seqs=3,
        attention_backend="triton", max_num_batched_tokens=16,
    )  # fmt: skip
    loaded = build(args)
    assert loaded.info.attention_backend == "triton"
    engine = EngineCore(loaded.runner, loaded.scheduler)
    for request_id, (prompt, _) in wanted.items():
        sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, seed=0, ignore_eos=True)
        engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling))
    given: dict[str, list[int]] = {request_id: [] for request_id in wanted}
    while engine.has_work:
        for output in engine.step().outputs:
            given[output.request_id] += output.new_token_ids
    assert given == {request_id: tokens for request_id, (_, tokens) in wanted.items()}
