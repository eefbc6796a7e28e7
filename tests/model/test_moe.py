"""Qwen3-MoE against transformers in float32, and the mixture of experts against a loop over tokens in float64."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from nanoserve.core.errors import CheckpointError, ConfigError
from nanoserve.model.architectures import ARCHITECTURES
from nanoserve.model.config import MoEConfig, parse_config
from nanoserve.model.kernels import choose_kernels
from nanoserve.model.kernels.native import dispatch
from nanoserve.model.layers.moe import SparseMoE
from nanoserve.model.quant import linear_method
from tests import checkpoints
from tests.checkpoints import SMALL_VOCAB, edit_config
from tests.model.driver import Driver, Habits
from tests.model.test_loading import answer, edit_tensors, shards, their_answer
from tests.model.test_runner import MIN_GAP, NUM_TOKENS, Reference, greedy, load, params


@pytest.fixture(params=["auto", "off"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The native kernels where there are some, and torch alone."""
    monkeypatch.setenv(dispatch.VARIABLE, request.param)
    level: str = request.param
    return level


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Prompts, some with a shared beginning, whose greedy continuation is clear-cut."""
    model = checkpoints.sens_moe_model(seed=1)
    folder = checkpoints.save(model, tmp_path_factory.mktemp("moe"))
    rng = random.Random(0)
    shared = [rng.randrange(SMALL_VOCAB) for _ in range(48)]
    found = Reference(folder, model, [], [], [])
    while len(found.prompts) < 9:
        prompt = [rng.randrange(SMALL_VOCAB) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 64]))]
        prompt = shared + prompt if len(found.prompts) % 3 == 0 else prompt
        tokens, values, gap = greedy(model, prompt, NUM_TOKENS)
        if gap > MIN_GAP:
            found.prompts.append(prompt)
            found.outputs.append(tokens)
            found.logprobs.append(values)
    return found


@pytest.mark.parametrize(
    "habits",
    [
        Habits(max_batch=1),
        Habits(max_chunk=16, reuse_prefixes=True),
        Habits(max_chunk=33, preempt_one_in=15, reuse_prefixes=True, seed=1),
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers_however_the_work_is_cut(
    reference: Reference, habits: Habits, isa: str
) -> None:
    loaded = load(reference.folder)
    driver = Driver(loaded, habits)
    requests = driver.run(reference.prompts, [params(logprobs=0)] * len(reference.prompts))
    assert [r.token_ids[r.num_prompt_tokens :] for r in requests] == reference.outputs
    for request, values in zip(requests, reference.logprobs, strict=True):
        assert [entry.logprob for entry in request.logprobs] == pytest.approx(values, abs=1e-4)
    assert driver.num_preemptions > 0 or not habits.preempt_one_in
    loaded.runner.close()


def test_seeded_samples_do_not_depend_on_the_plan(reference: Reference) -> None:
    loaded = load(reference.folder)
    wanted = [params(temperature=0.8, top_p=0.9, seed=i) for i in range(len(reference.prompts))]
    runs = [
        [r.token_ids for r in Driver(loaded, habits).run(reference.prompts, wanted)]
        for habits in (Habits(max_batch=1), Habits(max_chunk=9, preempt_one_in=10, seed=3))
    ]
    assert runs[0] == runs[1]


def name_experts_as_released(raw: dict[str, Any]) -> None:
    assert "num_local_experts" in raw
    raw["num_experts"] = raw.pop("num_local_experts")


def leave_out_the_head_size(raw: dict[str, Any]) -> None:
    del raw["head_dim"]


@pytest.mark.parametrize(
    ("overrides", "edit"),
    [
        ({"norm_topk_prob": False}, None),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, None),
        ({"num_experts_per_tok": 8, "mlp_only_layers": []}, None),
        ({"num_experts_per_tok": 1, "norm_topk_prob": False, "attention_bias": True}, None),
        ({}, name_experts_as_released),
        ({"head_dim": 16}, leave_out_the_head_size),
    ],
    ids=str,
)
def test_configurations_mean_what_transformers_takes_them_to_mean(
    tmp_path: Path, overrides: dict[str, Any], edit: Callable[[dict[str, Any]], None] | None
) -> None:
    folder = checkpoints.save(checkpoints.sens_moe_model(seed=2, **overrides), tmp_path / "moe")
    if edit is not None:
        edit_config(folder, edit)
    assert answer(folder) == their_answer(folder)


# Checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.sens_moe_model(seed=3), tmp_path / "moe")


def stack(tensors: dict[str, Tensor]) -> None:
    """As transformers 5 names and shapes them in memory."""
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{prefix}down_proj"] = down


STACK = "model.layers.2.mlp.experts.gate_up_proj"
ONE = "model.layers.2.mlp.experts.5.up_proj.weight"


def test_stacked_experts_equal_those_one_by_one(folder: Path) -> None:
    one_by_one = answer(folder)
    edit_tensors(folder / "model.safetensors", stack)
    assert STACK in load_file(folder / "model.safetensors")
    assert answer(folder) == one_by_one == their_answer(folder)


def test_experts_in_several_shards_are_found(folder: Path, tmp_path: Path) -> None:
    sharded = checkpoints.save(checkpoints.sens_moe_model(seed=3), tmp_path / "sharded", max_shard_size="150KB")
    assert len(shards(sharded)) > 3
    assert answer(sharded) == answer(folder)


def shorten(tensors: dict[str, Tensor]) -> None:
    tensors[ONE] = tensors[ONE][:-1].clone()


def lose(tensors: dict[str, Tensor]) -> None:
    del tensors[ONE]


def keep_both(tensors: dict[str, Tensor]) -> None:
    kept = tensors[ONE]
    stack(tensors)
    tensors[ONE] = kept


def stack_fewer(tensors: dict[str, Tensor]) -> None:
    stack(tensors)
    tensors[STACK] = tensors[STACK][:7].clone()


def stack_flat(tensors: dict[str, Tensor]) -> None:
    stack(tensors)
    tensors[STACK] = tensors[STACK].flatten(0, 1)


def stack_crosswise(tensors: dict[str, Tensor]) -> None:
    stack(tensors)
    tensors[STACK] = tensors[STACK].transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shorten, rf"model\.safetensors.*{ONE} has shape \[47, 64\].*\[48, 64\]"),
        (lose, f"{ONE} is missing"),
        (keep_both, f"{ONE} is stored twice"),
        (stack_fewer, r"experts\.7\.gate_proj\.weight is missing"),
        (stack_flat, rf"{STACK} has shape \[768, 64\].*\[experts, 2 x features, features\]"),
        (stack_crosswise, r"experts\.0\.gate_proj\.weight has shape \[32, 96\].*\[48, 64\]"),
    ],
)
def test_damaged_experts_are_named(folder: Path, damage: Callable[[dict[str, Tensor]], None], words: str) -> None:
    edit_tensors(folder / "model.safetensors", damage)
    with pytest.raises(CheckpointError, match=words):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_met_are_named(folder: Path, changes: dict[str, Any], words: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=words):
        parse_config(raw | changes, tuple(ARCHITECTURES))


# The layer


def exact(layer: SparseMoE, weights: dict[str, Tensor], x: Tensor, config: MoEConfig) -> Tensor:
    """By definition: every token by itself, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        probabilities = (weights["gate.weight"].double() @ row).softmax(0)
        chosen = probabilities.topk(config.num_experts_per_token).indices.tolist()
        total = sum(probabilities[e] for e in chosen) if config.normalizes_weights else 1.0
        for e in chosen:
            gate, up, down = (weights[f"experts.{e}.{part}_proj.weight"].double() for part in ("gate", "up", "down"))
            inner = torch.nn.functional.silu(gate @ row) * (up @ row)
            out[token] += probabilities[e] / total * (down @ inner)
    return out


def make_layer(config: MoEConfig, hidden_size: int, dtype: torch.dtype) -> tuple[SparseMoE, dict[str, Tensor]]:
    layer = SparseMoE(
        config,
        hidden_size,
        dtype=dtype,
        method=linear_method("none"),
        kernels=choose_kernels(hidden_size, config.intermediate_size),
    )
    generator = torch.Generator().manual_seed(0)
    weights = {name: slot.memory for name, slot in layer.slots("").items()}
    for weight in weights.values():
        weight.normal_(0.0, 0.3, generator=generator)
    copies = {name: weight.clone() for name, weight in weights.items()}
    layer.prepare()
    return layer, copies


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_tokens=st.integers(1, 40),
    num_experts=st.integers(1, 9),
    data=st.data(),
    normalizes=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@torch.inference_mode()
def test_the_layer_equals_its_definition(
    isa: str, num_tokens: int, num_experts: int, data: st.DataObject, normalizes: bool, dtype: torch.dtype
) -> None:
    config = MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=data.draw(st.integers(1, num_experts)),
        intermediate_size=data.draw(st.sampled_from([16, 32, 48])),
        normalizes_weights=normalizes,
        dense_layers=frozenset(),
    )
    layer, weights = make_layer(config, 32, dtype)
    x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)
    got, expected = layer(x).double(), exact(layer, weights, x, config)
    assert got.shape == expected.shape
    error = (got - expected).norm(dim=1) / expected.norm(dim=1)
    # bfloat16 logits may order two experts of nearly equal weight differently, so a few rows may differ.
    assert error.median() < (1e-5 if dtype == torch.float32 else 0.02)
    assert error.max() < 1e-4 or dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_token_does_not_depend_on_its_company(isa: str, dtype: torch.dtype) -> None:
    """To the last bit with the native kernels; torch's products change a little with the number of rows."""
    config = MoEConfig(
        num_experts=8, num_experts_per_token=3, intermediate_size=48, normalizes_weights=True, dense_layers=frozenset()
    )
    layer, _ = make_layer(config, 64, dtype)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = layer(x)
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([layer(row[None]) for row in x])
    is_native = dispatch.library() is not None
    for got, expected in ((layer(x[shuffled]), together[shuffled]), (alone, together)):
        if is_native:
            assert torch.equal(got, expected)
        elif dtype == torch.float32:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
        else:
            assert (got - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_experts_stay_near_full_precision(folder: Path, isa: str, quantization: str) -> None:
    """Relative error of log probabilities; what the linear layers lose is theirs (see ``test_integer.py``)."""
    prompt = [(7 * i) % SMALL_VOCAB for i in range(60)]
    wanted = params(prompt_logprobs=0, max_tokens=1)
    entries = [
        Driver(load(folder, **overrides), Habits()).run([prompt], [wanted])[0].prompt_logprobs
        for overrides in ({}, {"quantization": quantization})
    ]
    exact, rounded = (torch.tensor([entry.logprob for entry in part]) for part in entries)
    error = float((exact - rounded).norm() / exact.norm())
    assert 0 < error < (0.1 if quantization == "int8" else 0.5)
