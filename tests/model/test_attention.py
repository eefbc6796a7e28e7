"""Every attention backend against dense float64 attention over random paged batches."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.core.errors import ConfigError
from nanoserve.model.attention import BACKENDS, _load, choose_backend
from nanoserve.model.attention import cpu as cpu_backend
from nanoserve.model.attention.base import AttentionSpec, ForwardBatch
from nanoserve.model.kernels.triton import is_interpreted

NUM_BLOCKS = 40
BLOCK_SIZES = {"native": (16, 32, 64)}  # of the others: 4, 16


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if (reason := _load(BACKENDS[request.param]).reject(spec())) is not None:
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


def spec(**overrides: Any) -> AttentionSpec:
    chosen: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 16, "dtype": torch.float32,
        "device": torch.device("cpu"),
    }  # fmt: skip
    return AttentionSpec(**(chosen | overrides))


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query position at a time, one head at a time."""
    out = torch.zeros_like(q)
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = k[:seen, kv_head] @ q[i, head] / math.sqrt(q.shape[2])
            out[i, head] = scores.softmax(0) @ v[:seen, kv_head]
    return out


def check(backend_name: str, wanted: AttentionSpec, lens: list[tuple[int, int]], *, seed: int, atol: float) -> None:
    """``lens``: (tokens computed before, tokens computed now) of each request; blocks are scattered at random."""
    generator = torch.Generator().manual_seed(seed)
    backend, _ = choose_backend(backend_name, wanted)
    free = torch.randperm(NUM_BLOCKS, generator=generator).numpy()
    pool = torch.zeros(backend.kv_shape(num_layers=2, num_blocks=NUM_BLOCKS), dtype=backend.kv_dtype)
    tables = np.zeros((len(lens), NUM_BLOCKS), dtype=np.int64)
    for i, (before, now) in enumerate(lens):
        count = -(-(before + now) // wanted.block_size)
        tables[i, :count], free = free[:count], free[count:]

    def random(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, wanted.head_dim, generator=generator).to(wanted.dtype)

    keys = [random(before + now, wanted.num_kv_heads) for before, now in lens]
    values = [random(before + now, wanted.num_kv_heads) for before, now in lens]
    queries = [random(now, wanted.num_heads) for _, now in lens]

    def run(layer: int, parts: list[tuple[int, int, int]], q: Tensor) -> Tensor:
        """``parts``: (request, first position, past the last position)."""
        k = torch.cat([keys[i][a:b] for i, a, b in parts])
        v = torch.cat([values[i][a:b] for i, a, b in parts])
        batch = flat_batch(tables, parts, wanted.block_size)
        return backend.forward(q, k, v, backend.layer(pool, layer), backend.prepare(batch))

    for i, (before, _) in enumerate(lens):
        if before:
            run(1, [(i, 0, before)], random(before, wanted.num_heads))
    other_layer = backend.layer(pool, 0).clone()
    parts = [(i, before, before + now) for i, (before, now) in enumerate(lens)]
    out = run(1, parts, torch.cat(queries))
    exact = [plain_attention(*(x.double() for x in qkv)) for qkv in zip(queries, keys, values, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat(exact).flatten(1), rtol=0, atol=atol)
    assert torch.equal(backend.layer(pool, 0), other_layer)


def flat_batch(tables: np.ndarray, parts: list[tuple[int, int, int]], block_size: int) -> ForwardBatch:
    positions = np.concatenate([np.arange(a, b) for _, a, b in parts])
    owners = np.concatenate([np.full(b - a, i) for i, a, b in parts])
    return ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.long),
        positions=torch.from_numpy(positions),
        slot_blocks=torch.from_numpy(tables[owners, positions // block_size]),
        slot_offsets=torch.from_numpy(positions % block_size),
        query_lens=np.array([b - a for _, a, b in parts]),
        kv_lens=np.array([b for _, _, b in parts]),
        block_tables=tables[[i for i, _, _ in parts]],
    )


@settings(
    max_examples=10 if is_interpreted() else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lens=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 7)), min_size=1, max_size=7),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4)]),
    block_size=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_any_batch_equals_dense_attention(
    backend: str, lens: list[tuple[int, int]], heads: tuple[int, int], block_size: int, seed: int
) -> None:
    sizes = BLOCK_SIZES.get(backend, (4, 16, 20))
    wanted = spec(num_heads=heads[0], num_kv_heads=heads[1], block_size=sizes[block_size])
    check(backend, wanted, lens, seed=seed, atol=1e-5)


@pytest.mark.parametrize("count", [1, 5, 9])
def test_decode_only(backend: str, count: int) -> None:
    check(backend, spec(), [(i * 2, 1) for i in range(count)], seed=1, atol=1e-5)


def test_bfloat16(backend: str) -> None:
    check(backend, spec(dtype=torch.bfloat16), [(9, 1), (0, 12), (10, 5), (2, 1)], seed=2, atol=0.03)


def test_groups_that_are_split_for_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "_MAX_GROUP_TOKENS", 20)
    check("cpu", spec(), [(i, 1) for i in (3, 9, 12, 8, 9, 1)], seed=3, atol=1e-5)


def test_groups_hold_similar_lengths_and_every_request_once() -> None:
    kv_lens = np.array([10, 5000, 11, 4900, 9000, 40, 300, 290])
    groups = list(cpu_backend._similar(kv_lens, np.arange(len(kv_lens))))
    assert sorted(i for group in groups for i in group) == list(range(len(kv_lens)))
    assert [sorted(kv_lens[group]) for group in groups] == [[9000], [5000], [4900], [290, 300], [10, 11, 40]]


def test_a_forced_backend_that_cannot_serve_is_an_error() -> None:
    with pytest.raises(ConfigError, match="meta"):
        choose_backend("cpu", spec(device=torch.device("meta")))
    with pytest.raises(ConfigError, match="flash"):
        choose_backend("flash", spec())


def test_auto_records_whom_it_passed_over() -> None:
    backend, rejected = choose_backend("auto", spec(device=torch.device("meta")))
    assert backend.name == "reference"
    assert [name for name, _ in rejected] == list(BACKENDS)[:-1]
