"""Vectors and scores of the engine against transformers in float32, however the work is cut, whoever else runs."""

import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import CheckpointError
from nanoserve.core.outputs import RequestOutput
from nanoserve.core.pooling import NO_SAMPLING, PoolingKind, PoolingParams
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.core import EngineCore
from nanoserve.model.build import LoadedModel, build
from tests.pooling_checkpoints import FORMS, SMALL_VOCAB, Saved, write

EMBED = PoolingParams(kind=PoolingKind.EMBED)


@pytest.fixture(scope="module", autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return write(tmp_path_factory.mktemp("causal"), "causal", seed=3)


def load(saved: Saved, **overrides: Any) -> LoadedModel:
    settings: dict[str, Any] = {"kv_cache_memory": "256KiB", "max_num_seqs": 8, "max_model_len": 128}
    return build(EngineArgs(model=str(saved.folder), **(settings | overrides)))


def some_prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Lengths around the block size, every third with a shared beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(SMALL_VOCAB) for _ in range(32)]
    lengths = [1, 2, 15, 16, 17, 31, 33, 64]
    prompts = [[rng.randrange(SMALL_VOCAB) for _ in range(rng.choice(lengths))] for _ in range(count)]
    return [tuple(shared + prompt if index % 3 == 0 else prompt) for index, prompt in enumerate(prompts)]


def asking(prompts: Sequence[tuple[int, ...]], params: PoolingParams, name: str = "p") -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"{name}{index}", prompt_token_ids=prompt, sampling=NO_SAMPLING, pooling=params, arrival_s=0.0
        )
        for index, prompt in enumerate(prompts)
    ]


def run(core: EngineCore, requests: Sequence[GenerateRequest]) -> dict[str, RequestOutput]:
    """The last output of each request, by id."""
    for request in requests:
        core.add(request)
    last: dict[str, RequestOutput] = {}
    while core.has_work:
        last |= {output.request_id: output for output in core.step().outputs}
        core.scheduler.check_invariants()
    assert core.scheduler.stats().num_free_blocks == core.scheduler.stats().num_blocks
    return last


def numbers(output: RequestOutput) -> list[float]:
    return list(struct.unpack(f"<{len(output.pooled) // 4}f", output.pooled))


@pytest.mark.parametrize("overrides", [{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}], ids=str)
def test_embeddings_equal_transformers(saved: Saved, overrides: dict[str, Any]) -> None:
    """Cold and warm, in chunks, beside answers that grow and take the blocks away."""
    core = EngineCore(*_parts(load(saved, **overrides)))
    prompts = some_prompts(24)
    greedy = SamplingParams(temperature=0, seed=0, max_tokens=60)
    writers = [GenerateRequest(request_id=f"w{i}", prompt_token_ids=(i, 1, 2), sampling=greedy) for i in range(5)]
    expected = [saved.embed(prompt) for prompt in prompts]
    for warmth in ("cold", "warm"):
        last = run(core, [*writers, *asking(prompts, EMBED, warmth)])
        for index, vector in enumerate(expected):
            assert numbers(last[f"{warmth}{index}"]) == pytest.approx(vector, abs=2e-5), (warmth, index)
    if core.scheduler.stats().num_cached_blocks:
        assert any(output.num_cached_tokens for output in last.values())
    assert core.scheduler.stats().num_preemptions_total, "the pool must be too small for all of them"


def _parts(loaded: LoadedModel) -> tuple[Any, Any]:
    return loaded.runner, loaded.scheduler


def test_fewer_dimensions_are_cut_and_scaled_anew(saved: Saved) -> None:
    core = EngineCore(*_parts(load(saved)))
    prompt = (5, 6, 7, 8)
    last = run(core, asking([prompt], PoolingParams(kind=PoolingKind.EMBED, dimensions=10)))
    assert numbers(last["p0"]) == pytest.approx(saved.embed(prompt, 10), abs=2e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_scores_are_the_logits_of_the_last_token(saved: Saved, num_ranks: int) -> None:
    core = EngineCore(*_parts(load(saved, max_num_batched_tokens=11, tensor_parallel_size=num_ranks)))
    prompts, token_ids = some_prompts(12, seed=1), (400, 3, 77)
    both = [*asking(prompts, PoolingParams(kind=PoolingKind.SCORE, token_ids=token_ids)), *asking(prompts, EMBED, "e")]
    last = run(core, both)
    for index, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = saved.model(torch.tensor([prompt])).logits[0, -1, list(token_ids)]
        assert numbers(last[f"p{index}"]) == pytest.approx(logits.tolist(), abs=1e-4)
        assert numbers(last[f"e{index}"]) == pytest.approx(saved.embed(prompt), abs=2e-5)
    core.close()


@pytest.mark.parametrize(("form", "num_ranks"), [*[(form, 1) for form in FORMS], ("classifier", 2)])
def test_every_form_of_a_checkpoint_loads(tmp_path: Path, form: str, num_ranks: int) -> None:
    saved = write(tmp_path, form, seed=4)
    loaded = load(saved, tensor_parallel_size=num_ranks)
    tasks = {"causal": ("generate", "embed", "score"), "tied": ("generate", "embed", "score"), "classifier": ("score",)}
    assert loaded.info.tasks == tasks.get(form, ("embed",))
    assert loaded.info.hidden_size == 64
    core, prompt = EngineCore(*_parts(loaded)), (9, 8, 7, 6, 5)
    if form != "classifier":
        last = run(core, asking([prompt], EMBED))
        assert numbers(last["p0"]) == pytest.approx(saved.embed(prompt), abs=2e-5)
        return
    last = run(core, asking([prompt], PoolingParams(kind=PoolingKind.SCORE, token_ids=(0,))))
    with torch.inference_mode():
        yes, no = saved.model(torch.tensor([prompt])).logits[0, -1, [saved.id_of("yes"), saved.id_of("no")]].tolist()
    assert numbers(last["p0"]) == pytest.approx([yes - no], abs=1e-3)
    core.close()


def test_a_bare_checkpoint_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved = write(tmp_path, "bare")
    tensors = load_file(saved.folder / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, saved.folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        load(saved)


def test_bfloat16_vectors_are_as_close_as_transformers_own(saved: Saved) -> None:
    prompt = some_prompts(1, seed=2)[0]
    last = run(EngineCore(*_parts(load(saved, dtype="bfloat16"))), asking([prompt], EMBED))
    own = torch.tensor(numbers(last["p0"]))
    assert own.norm().item() == pytest.approx(1, abs=1e-5), "scaled in float32"
    exact = torch.tensor(saved.embed(prompt))
    saved.model.to(torch.bfloat16)
    half = torch.tensor(saved.embed(prompt)).float()
    saved.model.float()
    assert float((own - exact).norm()) < max(0.02, 1.5 * float((half - exact).norm()))
