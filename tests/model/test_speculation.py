"""Speculation changes when tokens come and never which: the real runner, with drafts that are right, wrong or neither.

SENS writes nothing twice, so an oracle stands in for the lookup where drafts must be many; SCRIPT and the demo model
repeat themselves.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve import LLM
from nanoserve.core.config import EngineArgs
from nanoserve.core.outputs import StepStats
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams, StructuredOutputs
from nanoserve.engine.core import EngineCore
from nanoserve.model.build import build
from tests import checkpoints
from tests.checkpoints import SMALL_VOCAB

NUM_TOKENS = 40


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["dense", "moe"])
def sens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = checkpoints.sens_model(seed=4) if request.param == "dense" else checkpoints.sens_moe_model(seed=4)
    return checkpoints.save(model, tmp_path_factory.mktemp("sens"))


def requests() -> list[GenerateRequest]:
    """One of each kind of setting that looks at positions or earlier tokens."""
    rng = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 0},
        {"temperature": 0.9, "seed": 7, "top_p": 0.95, "logprobs": 1},
        {"temperature": 1.5, "seed": -3 % 2**64, "frequency_penalty": 0.6, "top_k": 40},
        {"temperature": 1.0, "seed": 5, "min_tokens": 25, "stop_token_ids": list(range(0, SMALL_VOCAB, 3))},
        {"temperature": 0, "prompt_logprobs": 0, "logit_bias": {9: 3.0, 8: -3.0}},
    ]
    return [
        GenerateRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(rng.choices(range(SMALL_VOCAB), k=rng.choice((1, 15, 16, 40)))),
            sampling=SamplingParams(**({"seed": 0, "max_tokens": NUM_TOKENS} | kind)),
        )
        for i, kind in enumerate(kinds)
    ]


class Answers:
    """Runs requests through an engine to the end."""

    def __init__(self, folder: Path, wanted: Sequence[GenerateRequest], **settings: Any) -> None:
        given: dict[str, Any] = {"model": str(folder), "kv_cache_memory": "1MiB", "max_num_seqs": 8}
        loaded = build(EngineArgs(**(given | settings)))
        self.token_ids: dict[str, list[int]] = {request.request_id: [] for request in wanted}
        self.logprobs: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in wanted}
        self.num_steps = 0
        core = EngineCore(loaded.runner, loaded.scheduler)
        for request in wanted:
            core.add(request)
        while core.has_work:
            self._take(core)
        self.stats: StepStats = core.scheduler.stats()
        assert self.stats.num_free_blocks == self.stats.num_blocks

    def _take(self, core: EngineCore) -> None:
        self.num_steps += 1
        for output in core.step().outputs:
            self.token_ids[output.request_id] += output.new_token_ids
            self.logprobs[output.request_id] += output.logprobs
        core.scheduler.check_invariants()


class Oracle:
    """Stands in for the lookup: begins with right tokens, ends with a wrong one, and misses now and then."""

    answers: dict[tuple[int, ...], list[int]]

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._rng = random.Random(max_drafts)

    def guess(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        prompt = next(p for p in self.answers if tuple(token_ids[: len(p)]) == p)
        num_right = self._rng.randrange(min(self._max_drafts, limit) + 1)
        coming = self.answers[prompt][len(token_ids) - len(prompt) :][:num_right]
        wrong = [self._rng.randrange(SMALL_VOCAB) for _ in range(min(self._max_drafts, limit) - len(coming))]
        return (*coming, *wrong)

    def learn(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """Never discouraged."""


@pytest.mark.parametrize(
    "settings",
    [{}, {"block_size": 1}, {"max_num_batched_tokens": 7}, {"kv_cache_memory": "160KiB", "max_model_len": 128}],
    ids=str,
)
def test_answers_with_right_and_wrong_drafts_equal_those_without(
    sens: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests()
    plain = Answers(sens, wanted)
    Oracle.answers = {r.prompt_token_ids: plain.token_ids[r.request_id] for r in wanted}
    monkeypatch.setattr("nanoserve.scheduler.scheduler.Drafter", Oracle)
    monkeypatch.setattr("nanoserve.scheduler.drafts.MAX_ROWS", 40)
    drafted = Answers(sens, wanted, speculation="ngram", num_speculative_tokens=5, **settings)
    assert drafted.token_ids == plain.token_ids
    assert 0 < drafted.stats.num_accepted_tokens_total < drafted.stats.num_draft_tokens_total
    assert drafted.stats.num_preemptions_total > 0 or "max_model_len" not in settings
    for request_id, entries in plain.logprobs.items():
        got = drafted.logprobs[request_id]
        assert [entry.token_id for entry in got] == [entry.token_id for entry in entries]
        assert [entry.logprob for entry in got] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)


def test_a_model_that_loops_takes_a_fraction_of_the_steps(tmp_path: Path) -> None:
    script = [5, 17, 300, 42, 9, 77, 203, 64, 11, 12]
    folder = checkpoints.save(checkpoints.script_model(script, trigger=198, loop=True), tmp_path)
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1, 198), sampling=SamplingParams(temperature=0, seed=0, max_tokens=100)
    )
    plain = Answers(folder, [request])
    drafted = Answers(folder, [request], speculation="ngram")
    assert drafted.token_ids == plain.token_ids == {"r": script * 10}
    assert (plain.num_steps, drafted.num_steps < 25) == (100, True)


def test_demo_answers_and_json_do_not_change() -> None:
    colours = {"type": "array", "items": {"enum": ["red", "blue"]}}
    schema = {"type": "object", "properties": {"tags": colours}, "required": ["tags"], "additionalProperties": False}
    tags = StructuredOutputs(json=json.dumps(schema))
    asks = ["Copy these words: zembrila fontak zembrila fontak zembrila fontak", "Count from 1 to 40.", "Tags as JSON."]
    params = [
        SamplingParams(temperature=0, max_tokens=120),
        SamplingParams(temperature=1.2, seed=3, max_tokens=120),
        SamplingParams(temperature=1.0, seed=1, max_tokens=120, structured_outputs=tags),
    ]
    answers = []
    for speculation in ("none", "ngram"):
        with LLM("demo", speculation=speculation, kv_cache_memory="4MiB", max_num_seqs=4) as llm:
            results = llm.chat([[{"role": "user", "content": ask}] for ask in asks], params, use_tqdm=False)
            answers.append([result.outputs[0].token_ids for result in results])
            num_accepted = llm._core.scheduler.stats().num_accepted_tokens_total
    assert answers[0] == answers[1]
    assert num_accepted > 0
