"""The runner against transformers in float32: results do not depend on how a plan cuts the work."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve.core.config import EngineArgs
from nanoserve.core.plan import AdmittedState, BlockCopy, SampledTokens, ScheduledRequest, SchedulerOutput
from nanoserve.core.sampling import SamplingParams
from nanoserve.model.build import LoadedModel, build
from nanoserve.model.kernels.native import library, why_not
from tests import checkpoints
from tests.checkpoints import FULL_VOCAB, SMALL_VOCAB
from tests.model.driver import Driver, Habits
from tests.oracles import sampling as oracle

MIN_GAP = 0.01  # nats between the reference's two best tokens; closer calls are not demanded
NUM_TOKENS = 24


@dataclass(frozen=True)
class Reference:
    """A SENS checkpoint, and what transformers says after each prompt."""

    folder: Path
    model: Any
    prompts: list[list[int]]
    outputs: list[list[int]]
    logprobs: list[list[float]]


@pytest.fixture(scope="module", autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Prompts of 1 to 120 ids, some with a shared beginning, whose greedy continuation is clear-cut."""
    model = checkpoints.sens_model(seed=1)
    folder = checkpoints.save(model, tmp_path_factory.mktemp("sens"))
    rng = random.Random(0)
    shared = [rng.randrange(SMALL_VOCAB) for _ in range(48)]
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    logprobs: list[list[float]] = []
    while len(prompts) < 12:
        prompt = [rng.randrange(SMALL_VOCAB) for _ in range(rng.choice([1, 2, 15, 16, 17, 31, 32, 33, 64, 120]))]
        prompt = shared + prompt if len(prompts) % 3 == 0 else prompt
        tokens, values, gap = greedy(model, prompt, NUM_TOKENS)
        if gap > MIN_GAP:
            prompts.append(prompt)
            outputs.append(tokens)
            logprobs.append(values)
    return Reference(folder, model, prompts, outputs, logprobs)


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[float], float]:
    """Tokens, their log probabilities, and the smallest gap between the two best ones; one full pass a token."""
    tokens, values, gap = list(prompt), [], float("inf")
    for _ in range(count):
        best = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(2)
        tokens.append(int(best.indices[0]))
        values.append(float(best.values[0]))
        gap = min(gap, float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], values, gap


def load(folder: Path, **overrides: Any) -> LoadedModel:
    settings: dict[str, Any] = {"model": str(folder), "kv_cache_memory": "2MiB", "max_num_seqs": 16}
    return build(EngineArgs(**(settings | overrides)))


def params(**overrides: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "seed": 0, "max_tokens": NUM_TOKENS} | overrides))


@pytest.mark.parametrize(
    ("backend", "block_size"),
    [("cpu", 1), ("cpu", 16), ("cpu", 20), ("reference", 1), ("reference", 20), ("native", 16), ("native", 32)],
)
@pytest.mark.parametrize(
    "habits",
    [
        Habits(max_batch=1),
        Habits(),
        Habits(max_chunk=7),
        Habits(max_chunk=16, reuse_prefixes=True),
        Habits(max_chunk=50, max_batch=3, preempt_one_in=20),
        Habits(max_chunk=33, preempt_one_in=15, reuse_prefixes=True, seed=1),
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(reference: Reference, backend: str, block_size: int, habits: Habits) -> None:
    loaded = load(reference.folder, attention_backend=backend, block_size=block_size)
    driver = Driver(loaded, habits)
    requests = driver.run(reference.prompts, [params(logprobs=0)] * len(reference.prompts))
    assert [r.token_ids[r.num_prompt_tokens :] for r in requests] == reference.outputs
    for request, values in zip(requests, reference.logprobs, strict=True):
        assert [entry.logprob for entry in request.logprobs] == pytest.approx(values, abs=1e-4)
    assert driver.num_preemptions > 0 or not habits.preempt_one_in
    loaded.runner.close()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_answers_do_not_depend_on_the_plan_to_the_last_bit(
    reference: Reference, dtype: str, kv_cache_dtype: str
) -> None:
    """Also where rounding decides: tokens and logprobs are compared exactly, in bfloat16 and with int8 KV too."""
    if library() is None:
        pytest.skip(why_not())
    loaded = load(reference.folder, attention_backend="native", dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    runs = []
    for habits in (Habits(max_batch=1), Habits(), Habits(max_chunk=16, preempt_one_in=20, reuse_prefixes=True)):
        requests = Driver(loaded, habits).run(reference.prompts, [params(logprobs=2)] * len(reference.prompts))
        runs.append([(request.token_ids, request.logprobs) for request in requests])
    assert runs[0] == runs[1] == runs[2]
    loaded.runner.close()


def test_int8_kv_stays_near_full_precision_in_half_the_memory(reference: Reference) -> None:
    if library() is None:
        pytest.skip(why_not())
    prompt = max(reference.prompts, key=len)
    whole = load(reference.folder, dtype="bfloat16")
    small = load(reference.folder, dtype="bfloat16", kv_cache_dtype="int8")
    with torch.inference_mode():
        exact = reference.model(torch.tensor([prompt])).logits[0].double()
    errors = [float((all_logits(loaded, prompt) - exact).norm() / exact.norm()) for loaded in (whole, small)]
    assert errors[1] < 2 * errors[0] + 0.01
    assert whole.info.kv_bytes_per_token == 2 * 2 * 2 * 32 * 2  # layers, key and value, KV heads, head_dim, bytes
    assert small.info.kv_bytes_per_token == 2 * 2 * 2 * (32 + 4)


def test_seeded_samples_do_not_depend_on_the_plan(reference: Reference) -> None:
    loaded = load(reference.folder)
    wanted = [
        params(temperature=0.8, top_p=0.9, seed=i, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)
        for i in range(len(reference.prompts))
    ]
    runs = [
        [r.token_ids for r in Driver(loaded, habits).run(reference.prompts, wanted)]
        for habits in (Habits(max_batch=1), Habits(), Habits(max_chunk=9, preempt_one_in=10, seed=3))
    ]
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) == len(reference.prompts)


def test_penalties_see_prompt_and_output_as_the_oracle_does(reference: Reference) -> None:
    loaded = load(reference.folder)
    wanted = params(
        repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=6, stop_token_ids=[78, 104]
    )
    for prompt in reference.prompts[:4]:
        request = Driver(loaded, Habits(max_chunk=20)).run([prompt], [wanted])[0]
        known = list(prompt)
        for token in request.token_ids[len(prompt) :]:
            with torch.inference_mode():
                row = reference.model(torch.tensor([known])).logits[0, -1].numpy().astype(np.float64)
            exact = oracle.adjusted(row, wanted, prompt, known[len(prompt) :])
            assert exact.max() - exact[token] < 1e-3
            known.append(token)


def test_prompt_logprobs_equal_transformers(reference: Reference) -> None:
    loaded = load(reference.folder)
    wanted = params(prompt_logprobs=3, max_tokens=2)
    for habits in (Habits(), Habits(max_chunk=5), Habits(max_chunk=1)):
        requests = Driver(loaded, habits).run(reference.prompts, [wanted] * len(reference.prompts))
        for request, prompt in zip(requests, reference.prompts, strict=True):
            with torch.inference_mode():
                exact = reference.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            assert [entry.token_id for entry in request.prompt_logprobs] == prompt[1:]
            for position, entry in enumerate(request.prompt_logprobs):
                assert entry.logprob == pytest.approx(float(exact[position, entry.token_id]), abs=1e-4)
                assert entry.rank == int((exact[position] > exact[position, entry.token_id]).sum()) + 1
                assert [v for _, v in entry.top] == pytest.approx(exact[position].topk(3).values.tolist(), abs=1e-4)


def test_logits_equal_transformers_within_1e_4(reference: Reference) -> None:
    loaded = load(reference.folder)
    prompt = max(reference.prompts, key=len)
    request = Driver(loaded, Habits(max_chunk=40)).run([prompt], [params(prompt_logprobs=20, max_tokens=1)])[0]
    with torch.inference_mode():
        logits = reference.model(torch.tensor([prompt])).logits[0]
    exact = logits.log_softmax(-1)
    for position, entry in enumerate(request.prompt_logprobs):
        for token_id, value in entry.top:
            assert abs(value - float(exact[position, token_id])) < 1e-4


def test_a_step_beats_once_a_layer(reference: Reference) -> None:
    loaded = load(reference.folder)
    before = loaded.runner.num_beats
    prefill(loaded, range(10, 30), params(max_tokens=1), blocks=range(4))
    assert loaded.runner.num_beats - before == len(reference.model.model.layers)


def step(loaded: LoadedModel, *scheduled: ScheduledRequest, **plan: Any) -> dict[str, SampledTokens]:
    return dict(loaded.runner.execute(SchedulerOutput(step_id=1, scheduled=scheduled, **plan)).sampled)


def prefill(loaded: LoadedModel, prompt: Sequence[int], sampling: SamplingParams, *, blocks: Sequence[int]) -> int:
    admitted = AdmittedState(token_ids=tuple(prompt), num_prompt_tokens=len(prompt), sampling=sampling)
    request = ScheduledRequest(
        request_id="a",
        token_ids=tuple(prompt),
        num_computed_tokens=0,
        new_block_ids=tuple(blocks),
        num_logits=1,
        num_samples=1,
        admitted=admitted,
    )
    return step(loaded, request)["a"].token_ids[0]


@pytest.mark.parametrize(
    "sampling",
    [params(), params(temperature=1.0, seed=5, logprobs=2), params(frequency_penalty=1.0, logprobs=0)],
    ids=["greedy", "seeded", "penalized"],
)
@pytest.mark.parametrize("num_right", [0, 1, 3, 5])
def test_drafts_are_accepted_just_as_far_as_they_are_right(
    reference: Reference, sampling: SamplingParams, num_right: int
) -> None:
    loaded = load(reference.folder)
    prompt = reference.prompts[3]
    truth = Driver(loaded, Habits()).run([prompt], [sampling])[0]
    output = truth.token_ids[len(prompt) :]
    first = prefill(loaded, prompt, sampling, blocks=range(20))
    assert first == output[0]
    drafts = output[1:6]
    if num_right < 5:
        drafts[num_right] = (drafts[num_right] + 1) % SMALL_VOCAB
    request = ScheduledRequest(
        request_id="a",
        token_ids=(first, *drafts),
        num_computed_tokens=len(prompt),
        num_logits=6,
        num_samples=6,
    )
    got = step(loaded, request)["a"]
    assert list(got.token_ids) == output[1 : num_right + 2]
    for entry, expected in zip(got.logprobs, truth.logprobs[1 : num_right + 2], strict=sampling.logprobs is not None):
        assert entry.token_id == expected.token_id
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)
    known = len(prompt) + 1 + num_right
    again = ScheduledRequest(
        request_id="a", token_ids=(got.token_ids[-1],), num_computed_tokens=known, num_logits=1, num_samples=1
    )
    assert step(loaded, again)["a"].token_ids[0] == output[num_right + 2]
    loaded.runner.close()


def test_block_copies_carry_all_layers(reference: Reference) -> None:
    loaded = load(reference.folder)
    prompt = (reference.prompts[0] * 2)[:40]
    expected, logprobs, _ = greedy(reference.model, prompt, 2)
    prefill(loaded, prompt, params(), blocks=(1, 2, 3))
    copies = tuple(BlockCopy(source_block_id=i, target_block_id=i + 10) for i in (1, 2, 3))
    admitted = AdmittedState(token_ids=(*prompt, expected[0]), num_prompt_tokens=40, sampling=params(logprobs=0))
    moved = ScheduledRequest(
        request_id="b",
        token_ids=(expected[0],),
        num_computed_tokens=40,
        new_block_ids=(11, 12, 13),
        num_logits=1,
        num_samples=1,
        admitted=admitted,
    )
    got = step(loaded, moved, block_copies=copies, released_request_ids=("a",))["b"]
    assert got.token_ids == (expected[1],)
    assert got.logprobs[0].logprob == pytest.approx(logprobs[1], abs=1e-4)
    loaded.runner.close()


def test_an_empty_plan_and_an_unknown_release_are_fine(reference: Reference) -> None:
    assert step(load(reference.folder), released_request_ids=("never seen",)) == {}


def test_bfloat16_stays_near_float32(reference: Reference, tmp_path: Path) -> None:
    """Relative L2 of the log probabilities' logits; random weights make bfloat16 tokens a coin toss."""
    prompt = [t % SMALL_VOCAB for t in range(7, 90)]
    with torch.inference_mode():
        exact = reference.model(torch.tensor([prompt])).logits[0].double()
        half = reference.model.to(torch.bfloat16)(torch.tensor([prompt])).logits[0].double()
    reference.model.float()
    loaded = load(reference.folder, dtype="bfloat16")
    got = all_logits(loaded, prompt)
    own, theirs = (float((x - exact).norm() / exact.norm()) for x in (got, half))
    assert own < max(0.02, 1.2 * theirs)


def all_logits(loaded: LoadedModel, prompt: Sequence[int]) -> torch.Tensor:
    """The logits that the runner's sampler would see after each token of ``prompt``."""
    seen: list[torch.Tensor] = []
    runner: Any = loaded.runner
    network = runner._network
    original = network.logits

    class Spy:
        forward = staticmethod(network.forward)
        norm = staticmethod(network.norm)

        @staticmethod
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(original(hidden))
            return seen[-1]

    runner._network = Spy()
    Driver(loaded, Habits(max_chunk=1)).run([prompt], [params(prompt_logprobs=0, max_tokens=1)])
    return torch.cat(seen).double()


def test_the_full_vocabulary(tmp_path: Path) -> None:
    model = checkpoints.sens_model(FULL_VOCAB, seed=2)
    folder = checkpoints.save(model, tmp_path)
    rng = random.Random(4)
    prompt = [rng.randrange(FULL_VOCAB) for _ in range(30)]
    tokens, _, gap = greedy(model, prompt, 4)
    assert gap > MIN_GAP, "choose another seed"
    request = Driver(load(folder), Habits(max_chunk=11)).run([prompt], [params(max_tokens=4)])[0]
    assert request.token_ids[30:] == tokens


def test_a_scripted_model_says_its_script(tmp_path: Path) -> None:
    script = [5, 17, 300, 5, 42, 17, 9]
    folder = checkpoints.save(checkpoints.script_model(script, trigger=198), tmp_path)
    for dtype in ("float32", "bfloat16"):
        request = Driver(load(folder, dtype=dtype), Habits()).run([[1, 2, 3, 198]], [params(max_tokens=8)])[0]
        assert request.token_ids[4:] == [*script, checkpoints.eos_token_id(SMALL_VOCAB)]
