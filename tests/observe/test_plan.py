"""The plan against models that were really built, against bytes counted by hand, and at the limits of its table."""

from pathlib import Path

import pytest

from nanoserve.cli import main
from nanoserve.cli.plan import _shape
from nanoserve.core.config import EngineArgs
from nanoserve.model.architectures import ARCHITECTURES
from nanoserve.model.build import build
from nanoserve.model.config import load_config
from nanoserve.observe.plan import DEVICES, Load, ModelShape, decode_seconds, plan_memory
from tests import checkpoints

LOAD = Load(max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=2048)


def shape_of(folder: Path, *flags: str) -> ModelShape:
    import argparse

    from nanoserve.cli.plan import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([str(folder), "--device", "h200", *flags])
    return _shape(load_config(folder, tuple(ARCHITECTURES)), options)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_it_predicts_what_the_engine_then_counts(tmp_path: Path, kind: str) -> None:
    model = checkpoints.sens_model() if kind == "dense" else checkpoints.sens_moe_model()
    folder = checkpoints.save(model, tmp_path)
    shape = shape_of(folder)
    info = build(EngineArgs(model=str(folder), kv_cache_memory="1MiB")).info
    assert shape.num_parameters == info.num_parameters
    memory = plan_memory(shape, DEVICES["h200"], LOAD)
    assert memory.kv_bytes_a_token == info.kv_bytes_per_token
    assert memory.weights_bytes == 4 * info.num_parameters


def qwen3_8b() -> ModelShape:
    """Qwen3-8B's published shape: 36 layers, 4096 wide, 32 and 8 heads of 128, rows of 12,288."""
    return ModelShape(
        num_layers=36,
        hidden_size=4096,
        vocab_size=151936,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        attention_weights=36 * 4096 * (2 * 4096 + 2 * 1024),
        dense_weights=36 * 3 * 4096 * 12288,
        norm_weights=36 * (2 * 4096 + 256) + 4096,
        is_tied=False,
        weight_bytes=2,
        dtype_bytes=2,
        kv_head_bytes=256,
        widest_row=2 * 12288,
    )


def test_8b_on_one_and_two_devices() -> None:
    shape, device = qwen3_8b(), DEVICES["h200"]
    assert shape.num_parameters == 8_190_735_360
    one = plan_memory(shape, device, LOAD)
    assert (one.weights_bytes, one.kv_bytes_a_token) == (2 * 8_190_735_360, 144 * 1024)
    parts = one.weights_bytes + one.activation_bytes + one.graph_bytes + one.fixed_bytes + one.kv_bytes
    assert parts == int(141e9 * 0.9)
    two = plan_memory(shape, device, Load(**{**_fields(LOAD), "tensor_parallel_size": 2}))
    assert two.kv_bytes_a_token == 72 * 1024
    assert two.weights_bytes == pytest.approx(one.weights_bytes / 2, rel=1e-3)
    # One request: 7.57 billion weights of 2 bytes and 1,000 tokens of KV, over 4.8 TB/s.
    expected_s = (2 * (8_190_735_360 - 151936 * 4096 - shape.norm_weights) + 1000 * 144 * 1024) / 4.8e12
    assert decode_seconds(shape, device, batch=1, context=1000) == pytest.approx(expected_s)


def _fields(load: Load) -> dict[str, int]:
    return {name: getattr(load, name) for name in Load.__dataclass_fields__}


def test_a_step_of_many_tokens_reads_every_expert_and_one_token_reads_its_own(tmp_path: Path) -> None:
    shape = shape_of(checkpoints.save(checkpoints.sens_moe_model(), tmp_path))
    assert shape.linear_weights_read(1) == pytest.approx(shape.weights_a_token + 512 * 64)
    everything = shape.num_parameters - shape.norm_weights - 512 * 64
    assert shape.linear_weights_read(1000) == pytest.approx(everything)


def test_the_command_needs_config_json_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.save(checkpoints.sens_model(), tmp_path)
    (folder / "model.safetensors").unlink()
    assert main(["plan", str(folder), "--device", "l40s", "--max-num-seqs", "8"]) == 0
    printed = capsys.readouterr().out
    assert all(
        word in printed for word in ("weights", "activations", "KV tokens", "requests at once", "decode", "l40s")
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tensor-parallel-size", "3"], "divide 4 heads"),
        (["--tensor-parallel-size", "0"], ">= 1"),
        (["--memory", "1GiB"], "h200 gives 0.9 GiB"),
        (["--memory", "much"], "memory size"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    folder = checkpoints.save(checkpoints.sens_model(), tmp_path)
    assert main(["plan", str(folder), "--device", "h200", *flags]) == 2
    assert words in capsys.readouterr().err


def test_no_such_model_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "/nowhere/at/all", "--device", "h200"]) == 2
    assert "/nowhere/at/all" in capsys.readouterr().err


def test_the_engine_counts_weights_in_their_final_form(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.sens_model(), tmp_path)
    plain, eight, four = (
        build(EngineArgs(model=str(folder), kv_cache_memory="1MiB", quantization=name)).info
        for name in ("none", "int8", "int4")
    )
    assert plain.num_parameters == eight.num_parameters == four.num_parameters
    assert plain.weights_bytes == 4 * plain.num_parameters
    embedding = 4 * 512 * 64  # untied, so it stays float32
    assert four.weights_bytes - embedding < 0.7 * (eight.weights_bytes - embedding)
    assert eight.weights_bytes - embedding < 0.3 * (plain.weights_bytes - embedding)
