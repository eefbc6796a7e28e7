"""Sampling against exact distributions and a slow oracle; a token depends on its own row, seed and position only."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from nanoserve.core.plan import AdmittedState, TokenLogprobs
from nanoserve.core.request import ThinkingBudget
from nanoserve.core.sampling import SamplingParams
from nanoserve.model.adjustments import SampleBatch
from nanoserve.model.randomness import uniforms
from nanoserve.model.sampler import Sampler, Samples
from nanoserve.model.sampling_table import SamplingTable
from tests.checkpoints import FULL_VOCAB
from tests.oracles import sampling as oracle

VOCAB = 500  # not a whole number of blocks of 128

PROMPT, OUTPUT = (3, 3, 7, 11), (5, 5, 7, 20)


def params(**overrides: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 0, "max_tokens": 1000} | overrides))


def sample(logits: Tensor, wanted: list[SamplingParams], *, first_position: int = 8, **batch: Any) -> Samples:
    """One row a SamplingParams, each a request with PROMPT and OUTPUT behind it."""
    table = SamplingTable(len(wanted))
    for row, row_params in enumerate(wanted):
        table.admit(row, AdmittedState(token_ids=PROMPT + OUTPUT, num_prompt_tokens=len(PROMPT), sampling=row_params))
    rows = np.arange(len(wanted))
    positions = np.full(len(wanted), first_position)
    return Sampler(table).sample(logits.clone(), SampleBatch(rows=rows, positions=positions, **batch))


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 2},
    {"top_k": 20},
    {"top_k": 100},
    {"top_k": 300},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {"min_p": 1e-6},
    {"min_p": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_k": 100, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.001},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "top_k": 5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"logit_bias": {0: 5.0, 7: -100.0, VOCAB - 1: 100.0}, "temperature": 2.0},
    {"min_tokens": 5, "stop_token_ids": [2, 499], "top_p": 0.9},
    {"min_tokens": 4, "stop_token_ids": [2, 499]},
    {
        "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {5: 2.0}, "min_tokens": 9,
        "stop_token_ids": [1],
    },
]  # fmt: skip


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_frequencies_match_the_exact_distribution(chosen: dict[str, Any]) -> None:
    logits = random_logits(1)
    count = 4000
    samples = sample(logits.expand(count, -1), [params(**chosen, seed=seed) for seed in range(count)])
    row = oracle.adjusted(logits[0].numpy(), params(**chosen), PROMPT, OUTPUT)
    expected = oracle.distribution(row, params(**chosen)) * count
    observed = np.bincount(samples.token_ids, minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    bins = np.append(observed[common], observed[~common].sum()), np.append(expected[common], expected[~common].sum())
    if bins[1][-1] < 5:
        bins = bins[0][:-1], bins[1][:-1] * (bins[0][:-1].sum() / bins[1][:-1].sum())
    if len(bins[0]) > 1:
        assert stats.chisquare(*bins).pvalue > 1e-4
    else:
        assert bins[0].sum() > 0.99 * count


@pytest.mark.parametrize(
    "chosen", [*SETTINGS, {"temperature": 0}, {"temperature": 0, "repetition_penalty": 2.0}], ids=str
)
@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
def test_every_token_is_the_oracles(chosen: dict[str, Any], spread: float) -> None:
    """Logits on a coarse grid, so that ties are everywhere, also at every border."""
    count = 8
    logits = (random_logits(2, count) * spread * 4).round() / 4
    samples = sample(logits, [params(**chosen, seed=seed) for seed in range(count)])
    for seed, token in enumerate(samples.token_ids):
        row = oracle.adjusted(logits[seed].numpy(), params(**chosen), PROMPT, OUTPUT)
        probabilities = oracle.distribution(row, params(**chosen))
        assert token == oracle.pick(probabilities, oracle.uniform(seed, 8)), (seed, chosen)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 63, 64, 255, 256, 400]),
    top_p=st.sampled_from([0.01, 0.5, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.02, 0.9]),
    grid=st.sampled_from([1.0, 8.0, 4096.0]),
)
def test_any_combination_gives_the_oracles_token(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, grid: float
) -> None:
    logits = (random_logits(seed) * grid).round() / grid
    wanted = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    expected = oracle.distribution(logits[0].numpy().astype(np.float64), wanted)
    assert sample(logits, [wanted]).token_ids == [oracle.pick(expected, oracle.uniform(seed, 8))]


def test_a_row_does_not_know_its_batch_mates() -> None:
    wanted = [params(**chosen, seed=seed) for seed, chosen in enumerate([*SETTINGS, {"temperature": 0}] * 2)]
    logits = random_logits(3, len(wanted))
    together = sample(logits, wanted).token_ids
    alone = [sample(logits[i : i + 1], [wanted[i]]).token_ids[0] for i in range(len(wanted))]
    backwards = sample(logits.flip(0), wanted[::-1]).token_ids[::-1]
    assert together == alone == backwards


def test_the_uniform_number_is_splitmix64_of_seed_and_position() -> None:
    seeds = [0, 1, 2**64 - 1, 2**63, 12345]
    positions = [0, 1, 2**31, 7, 40960]
    values = uniforms(np.array(seeds, dtype=np.uint64), np.array(positions))
    assert values.tolist() == [oracle.uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    count = 20_000
    counting, fixed = np.arange(count), np.full(count, 9)
    over_seeds = uniforms(counting.astype(np.uint64), fixed)
    over_positions = uniforms(fixed.astype(np.uint64), counting)
    for values in (over_seeds, over_positions):
        assert values.min() >= 0
        assert values.max() < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(over_seeds, over_positions)[0, 1]) < 0.03


def test_seed_and_position_both_count() -> None:
    logits = random_logits(4)
    draws = {
        (s, p): sample(logits, [params(seed=s)], first_position=p).token_ids[0] for s in range(8) for p in range(8)
    }
    assert len({tuple(draws[s, p] for p in range(8)) for s in range(8)}) == 8
    assert len({tuple(draws[s, p] for s in range(8)) for p in range(8)}) == 8


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [450, 130, 131]] = 1.0
    assert sample(logits, [params(temperature=0), params(top_k=1, temperature=1)]).token_ids == [130, 130]


@pytest.mark.parametrize("chosen", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0}], ids=str)
def test_extreme_logits(chosen: dict[str, Any]) -> None:
    rows = torch.full((6, VOCAB), -math.inf)
    rows[0, 77] = 0.0  # one possible token
    rows[1] = 1e30  # equal and huge
    rows[1, 88] = 2e30
    rows[2, [5, 400]] = math.inf
    rows[3] = 0.0
    rows[3, 9] = math.nan
    rows[4] = -1e30
    rows[4, 499] = -1e-30
    tokens = sample(rows, [params(**chosen, seed=seed) for seed in range(6)]).token_ids
    assert tokens == [77, 88, 5, 9, 499, 0]  # nothing possible at all: token 0


def test_masked_tokens_are_never_drawn() -> None:
    logits = random_logits(5)
    logits[0, ::2] = -math.inf
    for chosen in ({}, {"top_p": 0.99}, {"top_k": 400}, {"temperature": 2.0, "min_p": 1e-9}):
        tokens = sample(logits.expand(500, -1), [params(**chosen, seed=seed) for seed in range(500)]).token_ids
        assert all(token % 2 for token in tokens)


def test_a_bitmask_allows_only_its_tokens_and_only_for_its_entries() -> None:
    allowed = [3, 32, 64, 499]
    words = np.zeros((VOCAB + 31) // 32, dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    mask = torch.from_numpy(words.view(np.int32))[None].expand(50, -1)
    logits = random_logits(6).expand(51, -1)
    wanted = [params(seed=seed, temperature=2.0) for seed in range(50)] + [params(temperature=0)]
    tokens = sample(logits, wanted, allowed=(np.arange(50), mask)).token_ids
    assert set(tokens[:50]) == set(allowed)
    assert tokens[50] == int(logits[0].argmax())


def test_a_finished_grammar_wins_over_min_tokens() -> None:
    """Else nothing is left to choose, and the answer would go on with token 0."""
    words = np.zeros((1, (VOCAB + 31) // 32), dtype=np.int32)
    words[0, 2] = 1  # token 64 alone
    wanted = [params(min_tokens=9, stop_token_ids=[3, 64], temperature=0)]
    assert sample(torch.zeros(1, VOCAB), wanted, allowed=(np.arange(1), torch.from_numpy(words))).token_ids == [64]
    words[0, 0] = 1 << 5  # token 5 too
    assert sample(torch.zeros(1, VOCAB), wanted, allowed=(np.arange(1), torch.from_numpy(words))).token_ids == [5]


def test_drafts_before_a_sample_count_as_output_for_penalties() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 42] = 1.0
    logits[:, 43] = 0.5
    wanted = [params(temperature=0, presence_penalty=1.0)] * 2
    assert sample(logits, wanted, drafts={1: (42,)}).token_ids == [42, 43]


def test_logprobs_are_of_the_unchanged_logits() -> None:
    logits = random_logits(7, 3)
    wanted = [
        params(logprobs=3, temperature=0.5, top_k=5, logit_bias={9: 100.0}),
        params(logprobs=None),
        params(logprobs=0, repetition_penalty=1.5),
    ]
    samples = sample(logits, wanted)
    assert samples.token_ids[0] == 9
    assert sorted(samples.logprobs) == [0, 2]
    for entry, count in ((0, 3), (2, 0)):
        exact = logits[entry].double().log_softmax(0)
        check_logprobs(samples.logprobs[entry], samples.token_ids[entry], exact, count)


def check_logprobs(entry: TokenLogprobs, token: int, exact: Tensor, count: int) -> None:
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(exact[token].item(), abs=1e-5)
    assert entry.rank == int((exact > exact[token]).sum()) + 1
    best = exact.topk(count)
    assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_more_logprobs_than_tokens() -> None:
    samples = sample(random_logits(8, vocab=16), [params(logprobs=20)])
    assert sorted(token for token, _ in samples.logprobs[0].top) == list(range(16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_full_vocabulary(dtype: torch.dtype) -> None:
    chosen: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"top_p": 0.4, "temperature": 0.3},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"logprobs": 5},
    ]
    logits = random_logits(9, len(chosen), FULL_VOCAB, scale=3.0).to(dtype)
    samples = sample(logits, [params(**settings, seed=seed) for seed, settings in enumerate(chosen)])
    for seed, settings_ in enumerate(chosen):
        row = logits[seed].float().numpy().astype(np.float64)
        probabilities = oracle.distribution(row, params(**settings_))
        token, draw = samples.token_ids[seed], oracle.uniform(seed, 8)
        below, above = probabilities[:token].sum(), probabilities[: token + 1].sum()
        assert below - 1e-6 <= draw <= above + 1e-6, (seed, settings_)
    if dtype == torch.float32:  # bfloat16 ties, so the best five have no one order
        check_logprobs(samples.logprobs[6], samples.token_ids[6], logits[6].double().log_softmax(0), 5)


@pytest.mark.parametrize(
    ("num_tokens", "open_id", "drafts", "ends"),
    [
        (4, None, (), True),
        (5, None, (), False),
        (5, None, (8,), True),
        (6, None, (9, 8), False),  # 9 closed them
        (0, None, (), True),
        (1, 7, (), True),  # thoughts began behind the 7 of the output
        (2, 7, (), False),
        (0, 9, (), False),  # they have not begun
        (0, 9, (9,), False),
    ],
)
def test_spent_thoughts_are_closed(num_tokens: int, open_id: int | None, drafts: tuple[int, ...], ends: bool) -> None:
    """The output is 5, 5, 7, 20; token 9 closes thoughts."""
    thinking = ThinkingBudget(num_tokens, 9, open_id)
    for wanted in (params(temperature=1.0), params(temperature=0, top_k=5), params(logit_bias={9: -100})):
        assert closes(thinking, wanted, drafts) == ends


def closes(thinking: ThinkingBudget, wanted: SamplingParams, drafts: tuple[int, ...]) -> bool:
    """Whether 9, which no logit favours, is chosen whatever the position, and beside a row without a budget."""
    table = SamplingTable(2)
    for row, budget in enumerate((thinking, None)):
        state = AdmittedState(
            token_ids=PROMPT + OUTPUT, num_prompt_tokens=len(PROMPT), sampling=wanted, thinking=budget
        )
        table.admit(row, state)
    logits = random_logits(3, 2)
    logits[:, 9] = -50.0
    tokens = []
    for position in range(8, 28):
        batch = SampleBatch(rows=np.arange(2), positions=np.full(2, position), drafts={0: drafts})
        chosen = Sampler(table).sample(logits.clone(), batch).token_ids
        assert chosen[1] != 9
        tokens.append(chosen[0])
    assert len(set(tokens)) == 1 or 9 not in tokens
    return tokens[0] == 9


def test_thoughts_end_later_where_the_grammar_forbids_it_now() -> None:
    table = SamplingTable(1)
    state = AdmittedState(
        token_ids=PROMPT, num_prompt_tokens=len(PROMPT), sampling=params(temperature=0), thinking=ThinkingBudget(0, 9)
    )
    table.admit(0, state)
    words = np.zeros((1, (VOCAB + 31) // 32), dtype=np.int32)
    words[0, 0] = 1 << 5
    allowed = (np.arange(1), torch.from_numpy(words))
    for expected in (5, 9):
        batch = SampleBatch(rows=np.arange(1), positions=np.full(1, 4), allowed=allowed)
        assert Sampler(table).sample(torch.zeros(1, VOCAB), batch).token_ids == [expected]
        words[0, 0] |= 1 << 9
