"""Native attention in every level against dense float64 attention, and against itself under other plans."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.model.attention.base import AttentionSpec, ForwardBatch, HeadNorms
from nanoserve.model.attention.heads import prepared_heads
from nanoserve.model.attention.native import NativeAttention
from nanoserve.model.attention.reference import dense_attention
from nanoserve.model.kernels.native import Library

ATOL = {torch.float32: 1e-5, torch.bfloat16: 0.04}
LAYERS, LAYER = 2, 1
a_spec = st.builds(
    lambda heads, head_dim, block_size, dtype, kv: AttentionSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
        kv_cache_dtype=kv,
    ),
    st.sampled_from([(1, 1), (4, 2), (5, 1), (16, 2), (20, 1), (64, 1), (3, 3)]),
    st.sampled_from([16, 32, 48, 64, 80, 128, 256]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["auto", "int8"]),
)
an_amount = st.one_of(st.integers(1, 5), st.sampled_from([15, 16, 17, 63, 64, 65]), st.integers(1, 100))
a_past = st.one_of(st.just(0), an_amount, st.sampled_from([511, 512, 513, 1100]))


@dataclass(frozen=True)
class Texts:
    """Queries, keys and values of some requests, [length, heads, head_dim] each."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]

    @staticmethod
    def random(spec: AttentionSpec, lengths: Sequence[int], seed: int) -> "Texts":
        generator = torch.Generator().manual_seed(seed)

        def tensors(heads: int) -> list[Tensor]:
            shapes = [(length, heads, spec.head_dim) for length in lengths]
            return [torch.randn(shape, generator=generator).to(spec.dtype) for shape in shapes]

        return Texts(tensors(spec.num_heads), tensors(spec.num_kv_heads), tensors(spec.num_kv_heads))


class Cache:
    """A pool whose unwritten slots are NaN where they can be, and scattered blocks for each request."""

    def __init__(self, spec: AttentionSpec, lengths: Sequence[int], seed: int) -> None:
        self.spec, self.backend = spec, NativeAttention(spec)
        counts = [-(-length // spec.block_size) for length in lengths]
        self.pool = torch.zeros(
            self.backend.kv_shape(num_layers=LAYERS, num_blocks=sum(counts)), dtype=self.backend.kv_dtype
        )
        self.pool.fill_(255 if spec.kv_cache_dtype == "int8" else float("nan"))
        order = np.random.default_rng(seed).permutation(sum(counts))
        self.tables = np.zeros((len(lengths), max(counts)), dtype=np.int64)
        for row, count in enumerate(counts):
            self.tables[row, :count], order = order[:count], order[count:]

    def attend(self, texts: Texts, parts: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """``parts``: (request, first position, past the last). Gives [tokens, num_heads * head_dim] of each."""
        q, k, v = (torch.cat([x[i][a:b] for i, a, b in parts]) for x in (texts.q, texts.k, texts.v))
        kv, metadata = self.backend.layer(self.pool, LAYER), self.backend.prepare(self.batch(parts))
        return list(self.backend.forward(q, k, v, kv, metadata).split([b - a for _, a, b in parts]))

    def batch(self, parts: Sequence[tuple[int, int, int]]) -> ForwardBatch:
        positions = np.concatenate([np.arange(a, b) for _, a, b in parts])
        owners = np.concatenate([np.full(b - a, i) for i, a, b in parts])
        return ForwardBatch(
            token_ids=torch.zeros(len(positions), dtype=torch.long),
            positions=torch.from_numpy(positions),
            slot_blocks=torch.from_numpy(self.tables[owners, positions // self.spec.block_size]),
            slot_offsets=torch.from_numpy(positions % self.spec.block_size),
            query_lens=np.array([b - a for _, a, b in parts]),
            kv_lens=np.array([b for _, _, b in parts]),
            block_tables=self.tables[[i for i, _, _ in parts]],
        )


def stored(x: Tensor, spec: AttentionSpec) -> Tensor:
    """What the cache makes of ``x`` [length, heads, head_dim], in float64."""
    if spec.kv_cache_dtype == "auto":
        return x.double()
    top = x.float().abs().amax(-1, keepdim=True)
    return ((x.float() * torch.tensor(127.0).div(top)).round() * (top / 127)).double()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spec=a_spec,
    lens=st.lists(st.tuples(a_past, an_amount), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
)
def test_any_mixed_batch_equals_dense_attention(
    native: Library, spec: AttentionSpec, lens: list[tuple[int, int]], seed: int, threads: int
) -> None:
    native.set_threads(threads)
    lengths = [before + now for before, now in lens]
    texts, cache = Texts.random(spec, lengths, seed), Cache(spec, lengths, seed)
    for i, (before, _) in enumerate(lens):
        if before:
            cache.attend(texts, [(i, 0, before)])
    other = cache.pool[:, 1 - LAYER].view(torch.uint8).clone()
    outs = cache.attend(texts, [(i, before, before + now) for i, (before, now) in enumerate(lens)])
    for i, (before, _) in enumerate(lens):
        k, v = stored(texts.k[i], spec), stored(texts.v[i], spec)
        exact = dense_attention(texts.q[i][before:].double(), k, v).flatten(1)
        torch.testing.assert_close(outs[i].double(), exact, rtol=0, atol=ATOL[spec.dtype])
    assert torch.equal(cache.pool[:, 1 - LAYER].view(torch.uint8), other)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 64), (3, 48)])
def test_chunks_company_and_threads_change_nothing(
    native: Library, dtype: torch.dtype, kv_cache_dtype: str, num_heads: int, head_dim: int
) -> None:
    spec = AttentionSpec(
        num_heads=num_heads, num_kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype,
        device=torch.device("cpu"), kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    lengths = [1100, 37, 70]
    texts = Texts.random(spec, lengths, seed=1)

    def run(chunks: Sequence[int], threads: int, has_company: bool) -> Tensor:
        native.set_threads(threads)
        cache = Cache(spec, lengths, seed=len(chunks))
        ends = np.cumsum(chunks).tolist()
        company = [(1, 0, 37), (2, 0, 70)] if has_company else []
        outs = [
            cache.attend(texts, [*company, (0, end - size, end)])[-1] for end, size in zip(ends, chunks, strict=True)
        ]
        return torch.cat(outs)

    alone = run([1100], 1, False)
    assert torch.equal(run([1100], 2, True), alone)
    assert torch.equal(run([600, 500], 2, False), alone)
    assert torch.equal(run([1, 1, 1, 1000, *[1] * 97], 3, True), alone)
    assert torch.equal(run([513, 7, 80, 300, 200], 2, True), alone)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_a_merged_projection_is_normed_rotated_stored_and_attended(
    native: Library, dtype: torch.dtype, kv_cache_dtype: str, head_dim: int
) -> None:
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype, device=torch.device("cpu"),
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    qkv, cos, sin = random(50, 8 * head_dim), random(50, 1, head_dim), random(50, 1, head_dim)
    norms = HeadNorms(q=random(head_dim), k=random(head_dim), eps=1e-6)
    wide = HeadNorms(q=norms.q.double(), k=norms.k.double(), eps=1e-6)
    q, k, v = prepared_heads(qkv.double(), spec, wide, cos.double(), sin.double())
    cache = Cache(spec, [30, 20], seed=0)
    batch = cache.batch([(0, 0, 30), (1, 0, 20)])
    metadata, kv = cache.backend.prepare(batch), cache.backend.layer(cache.pool, LAYER)
    out = cache.backend.forward_merged(qkv, norms, cos, sin, kv, metadata)
    plain = replace(spec, kv_cache_dtype="auto") if dtype == torch.bfloat16 else spec
    keys, values = (stored(x.to(dtype), plain) for x in (k, v))
    exact = [dense_attention(q[rows], keys[rows], values[rows]) for rows in (slice(0, 30), slice(30, 50))]
    atol = 0.15 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.double(), torch.cat(exact).flatten(1), rtol=0, atol=atol)


def test_what_an_earlier_owner_left_cannot_poison_a_request(native: Library) -> None:
    """A NaN beside the last token was multiplied by a weight of zero, which is NaN."""
    spec = AttentionSpec(
        num_heads=1, num_kv_heads=1, head_dim=32, block_size=16, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    cache = Cache(spec, [40], seed=0)
    texts = Texts.random(spec, [40], seed=0)
    for i in range(40):
        assert cache.attend(texts, [(0, i, i + 1)])[0].isfinite().all()


def test_a_nan_stays_with_its_own_request(native: Library) -> None:
    spec = AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=32, block_size=16, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    cache = Cache(spec, [9, 9], seed=0)
    texts = Texts.random(spec, [9, 9], seed=0)
    texts.q[0][:] = float("nan")
    broken, whole = cache.attend(texts, [(0, 0, 9), (1, 0, 9)])
    assert broken.isnan().all()
    assert whole.isfinite().all()
