"""The cases of invariance, prefix-cache, preemption and kv-capacity: the real scheduler over the real model, float32.

Greedy tokens equal transformers' whatever the pool, the chunks, the batch, the cache and the order of arrival.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.core import EngineCore
from nanoserve.model.build import build
from tests import checkpoints
from tests.checkpoints import SMALL_VOCAB

BLOCK = 8
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 32 * 4  # layers, key and value, tokens, KV heads, head_dim, float32
MIN_GAP = 0.01
NUM_TOKENS = 16


@dataclass(frozen=True)
class Told:
    """What an engine told about one request."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    num_cached_tokens: int


class Engine:
    """An engine over a checkpoint, and the counters of its last run."""

    def __init__(self, folder: Path, *, num_blocks: int = 600, **settings: Any) -> None:
        chosen: dict[str, Any] = {"kv_cache_memory": num_blocks * BLOCK_BYTES, "block_size": BLOCK} | settings
        loaded = build(EngineArgs(model=str(folder), **chosen))
        self.core = EngineCore(loaded.runner, loaded.scheduler)
        self.num_preemptions = 0
        self._count = 0

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Told]:
        """All requests at once; at the end nothing may be held."""
        ids = []
        for prompt, sampling in zip(prompts, params, strict=True):
            self._count += 1
            ids.append(f"r{self._count}")
            self.core.add(GenerateRequest(request_id=ids[-1], prompt_token_ids=tuple(prompt), sampling=sampling))
        news: dict[str, list[RequestOutput]] = {request_id: [] for request_id in ids}
        while self.core.has_work:
            update = self.core.step()
            for output in update.outputs:
                news[output.request_id].append(output)
        stats = self.core.idle().stats
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        self.num_preemptions = stats.num_preemptions_total
        return [joined(news[request_id]) for request_id in ids]


def joined(outputs: Sequence[RequestOutput]) -> Told:
    reason = outputs[-1].finish_reason
    assert reason is not None
    return Told(
        [token for output in outputs for token in output.new_token_ids],
        [entry.logprob for output in outputs for entry in output.logprobs],
        reason,
        max(output.num_cached_tokens for output in outputs),
    )


def greedy(max_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, seed=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True)


@dataclass(frozen=True)
class Reference:
    """A checkpoint with prompts, and transformers' greedy continuation of each."""

    folder: Path
    model: Any
    prompts: list[list[int]]
    outputs: list[list[int]]
    logprobs: list[list[float]]


@torch.inference_mode()
def theirs(model: Any, prompt: Sequence[int], count: int = NUM_TOKENS) -> tuple[list[int], list[float], float]:
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(result.logits)[:, 0].log_softmax(-1).topk(2).values
    tokens: list[int] = result.sequences[0, len(prompt) :].tolist()
    return tokens, best[:, 0].tolist(), float((best[:, 0] - best[:, 1]).min())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """24 prompts of 1 to 150 ids, every third with a common beginning of 64."""
    model = checkpoints.sens_model(seed=11)
    folder = checkpoints.save(model, tmp_path_factory.mktemp("sens"))
    rng = random.Random(1)
    shared = rng.choices(range(SMALL_VOCAB), k=64)
    found = Reference(folder, model, [], [], [])
    while len(found.prompts) < 24:
        prompt = rng.choices(range(SMALL_VOCAB), k=rng.choice([1, 2, 7, 8, 9, 15, 16, 17, 40, 90, 150]))
        prompt = shared + prompt if len(found.prompts) % 3 == 0 else prompt
        tokens, logprobs, gap = theirs(model, prompt)
        if gap > MIN_GAP:
            found.prompts.append(prompt)
            found.outputs.append(tokens)
            found.logprobs.append(logprobs)
    return found


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
@pytest.mark.parametrize("budget", [16, 2048], ids=["chunks of 16", "whole prompts"])
@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_invariance(reference: Reference, caching: bool, budget: int, max_num_seqs: int) -> None:
    engine = Engine(
        reference.folder, enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs
    )
    orders = [list(range(24)), list(range(24))[::-1]]
    random.Random(2).shuffle(orders[0])
    for order in orders if max_num_seqs > 1 else orders[:1]:
        told = engine.run([reference.prompts[i] for i in order], [greedy()] * 24)
        for i, answer in zip(order, told, strict=True):
            assert answer.token_ids == reference.outputs[i]
            assert answer.logprobs == pytest.approx(reference.logprobs[i], abs=1e-3)
            assert answer.num_cached_tokens < len(reference.prompts[i])
    if caching:
        assert max(answer.num_cached_tokens for answer in told) >= 64


@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 1, 1])
@pytest.mark.parametrize("budget", [5, 2048])
def test_a_prompt_that_is_cached_to_the_last_token(reference: Reference, length: int, budget: int) -> None:
    rng = random.Random(length)
    prompt = rng.choices(range(SMALL_VOCAB), k=length)
    expected = theirs(reference.model, prompt)[0]
    engine = Engine(reference.folder, max_num_batched_tokens=budget)
    for repeat in range(3):
        (told,) = engine.run([prompt], [greedy()])
        assert told.token_ids == expected
        assert told.num_cached_tokens == (0 if repeat == 0 else (length - 1) // BLOCK * BLOCK)
    cold = Engine(reference.folder, max_num_batched_tokens=budget)
    assert [told.token_ids for told in cold.run([prompt] * 8, [greedy()] * 8)] == [expected] * 8


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
@pytest.mark.parametrize("budget", [16, 2048], ids=["chunks of 16", "whole prompts"])
def test_preemption(reference: Reference, caching: bool, budget: int) -> None:
    """Twelve requests, each of which fits alone, on a pool of 16 blocks; seeded ones among them."""
    rng = random.Random(3)
    prompts = [rng.choices(range(SMALL_VOCAB), k=rng.choice([10, 23, 24, 25, 31, 33, 60])) for _ in range(12)]
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=60, repetition_penalty=1.1)
        if i % 3
        else greedy(60)
        for i in range(12)
    ]
    settings: dict[str, Any] = {"enable_prefix_caching": caching, "max_num_batched_tokens": budget}
    small = Engine(reference.folder, num_blocks=16, **settings)
    told = small.run(prompts, params)
    assert small.num_preemptions > 0
    roomy = Engine(reference.folder, num_blocks=400, **settings)
    assert [answer.token_ids for answer in told] == [answer.token_ids for answer in roomy.run(prompts, params)]
    assert roomy.num_preemptions == 0
    assert all(len(answer.token_ids) == 60 for answer in told)


def test_a_request_that_outgrows_the_pool(reference: Reference) -> None:
    engine = Engine(reference.folder, num_blocks=8)
    with pytest.raises(InvalidRequestError):
        engine.run([[5] * (9 * BLOCK)], [greedy(1)])
    (told,) = engine.run([[5, 6, 7]], [greedy(4)])
    assert len(told.token_ids) == 4
    prompt = random.Random(4).choices(range(SMALL_VOCAB), k=7 * BLOCK)
    (told,) = engine.run([prompt], [SamplingParams(temperature=0, seed=0, max_tokens=None)])
    assert told.finish_reason is FinishReason.LENGTH
    assert BLOCK <= len(told.token_ids) <= BLOCK + 1


def test_min_tokens_and_every_stop_id(reference: Reference, tmp_path: Path) -> None:
    stop = checkpoints.eos_token_id(SMALL_VOCAB)
    folder = checkpoints.save(checkpoints.script_model([9, 10, 11], trigger=198), tmp_path)
    engine = Engine(folder)

    def run(**settings: Any) -> Told:
        return engine.run([[3, 198]], [SamplingParams(temperature=0, seed=0, max_tokens=12, **settings)])[0]

    assert run(stop_token_ids=[stop]).token_ids == [9, 10, 11, stop]
    assert run(stop_token_ids=[10, stop]).token_ids == [9, 10]
    assert len(run().token_ids) == 12
    held = run(stop_token_ids=[stop], min_tokens=8)
    assert len(held.token_ids) >= 8
    assert stop not in held.token_ids[:8]
