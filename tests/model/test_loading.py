"""A checkpoint loads whole or not at all, and the error names the file and the tensor; variants equal transformers."""

import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import CheckpointError, ConfigError
from nanoserve.core.sampling import SamplingParams
from nanoserve.model.build import LoadedModel, build
from nanoserve.model.folder import resolve_model
from tests import checkpoints
from tests.checkpoints import SMALL_VOCAB, edit_config
from tests.model.driver import Driver, Habits

INDEX = "model.safetensors.index.json"
PROMPT = random.Random(0).choices(range(SMALL_VOCAB), k=200)


def load(folder: Path, **overrides: Any) -> LoadedModel:
    settings: dict[str, Any] = {"model": str(folder), "kv_cache_memory": "1MiB", "max_num_seqs": 4}
    return build(EngineArgs(**(settings | overrides)))


def answer(folder: Path, prompt: Sequence[int] = PROMPT) -> list[int]:
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=8)
    return Driver(load(folder), Habits()).run([prompt], [sampling])[0].token_ids[len(prompt) :]


@torch.inference_mode()
def their_answer(folder: Path, prompt: Sequence[int] = PROMPT) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = checkpoints.save(checkpoints.sens_model(seed=3), tmp_path / "sharded", max_shard_size="250KB")
    assert len(shards(folder)) >= 3
    return folder


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.sens_model(seed=3), tmp_path / "single")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_shards_equal_one_file_and_transformers(sharded: Path, single: Path) -> None:
    assert answer(sharded) == answer(single) == their_answer(single)


def test_a_directory_called_like_weights_is_ignored(single: Path) -> None:
    (single / "x.safetensors").mkdir()
    (single / "model.safetensors").rename(single / "other.safetensors")
    (single / "model.safetensors").mkdir()
    assert len(answer(single)) == 8


def delete(shard: Path) -> None:
    shard.unlink()


def replace_by_pointer(shard: Path) -> None:
    shard.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 300000000\n")


def cut(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1000])


def cut_to_the_header(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:5])


def empty(shard: Path) -> None:
    shard.write_bytes(b"")


def make_directory(shard: Path) -> None:
    shard.unlink()
    shard.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (delete, "missing"),
        (replace_by_pointer, "LFS"),
        (cut, "cut short"),
        (cut_to_the_header, "cut short"),
        (empty, "empty"),
        (make_directory, "missing"),
    ],
)
def test_a_damaged_shard_is_named(sharded: Path, damage: Callable[[Path], None], words: str) -> None:
    shard = shards(sharded)[1]
    damage(shard)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(sharded)
    assert shard.name in caught.value.message


@pytest.mark.parametrize("damage", [replace_by_pointer, cut, empty])
def test_a_damaged_single_file_is_named(single: Path, damage: Callable[[Path], None]) -> None:
    damage(single / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(single)


def test_no_weights_at_all(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        load(single)


def edit_tensors(file: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"


def test_an_index_that_lies_is_caught(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shard = sharded / index["weight_map"][NORM]
    edit_tensors(shard, lambda tensors: tensors.pop(NORM))
    with pytest.raises(CheckpointError, match=NORM) as caught:
        load(sharded)
    assert shard.name in caught.value.message


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../a.safetensors"}}'])
def test_a_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        load(sharded)


def test_a_missing_tensor_is_named(single: Path) -> None:
    edit_tensors(single / "model.safetensors", lambda tensors: tensors.pop(NORM))
    with pytest.raises(CheckpointError, match=NORM) as caught:
        load(single)
    assert "model.safetensors" in caught.value.message


def test_an_unexpected_tensor_is_named(single: Path) -> None:
    edit_tensors(single / "model.safetensors", lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight"):
        load(single)


def test_a_misshapen_tensor_is_named_with_both_shapes(single: Path) -> None:
    edit_tensors(single / "model.safetensors", lambda tensors: tensors.update({NORM: torch.zeros(65)}))
    with pytest.raises(CheckpointError, match=NORM) as caught:
        load(single)
    assert "[65]" in caught.value.message
    assert "[64]" in caught.value.message


def test_an_integer_tensor_is_refused(single: Path) -> None:
    edit_tensors(single / "model.safetensors", lambda t: t.update({NORM: torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=NORM):
        load(single)


def test_two_files_with_one_tensor_are_refused(single: Path) -> None:
    (single / "model.safetensors").rename(single / "a.safetensors")
    save_file({NORM: torch.ones(64)}, single / "b.safetensors")
    with pytest.raises(CheckpointError, match=NORM):
        load(single)


class TestTiedEmbeddings:
    """Every way in which a checkpoint may or may not hold its own lm_head."""

    @pytest.fixture
    def tied(self, tmp_path: Path) -> Path:
        model = checkpoints.sens_model(seed=6, tie_word_embeddings=True)
        return checkpoints.save(model, tmp_path / "tied")

    def test_no_head_in_the_file(self, tied: Path) -> None:
        assert "lm_head.weight" not in load_file(tied / "model.safetensors")
        assert answer(tied) == their_answer(tied)

    def test_an_equal_head_in_the_file(self, tied: Path, caplog: pytest.LogCaptureFixture) -> None:
        def add(tensors: dict[str, torch.Tensor]) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

        before = answer(tied)
        edit_tensors(tied / "model.safetensors", add)
        with caplog.at_level(logging.WARNING, "nanoserve"):
            assert answer(tied) == before
        assert "lm_head" not in caplog.text

    def test_a_different_head_loses_with_a_warning(self, tied: Path, caplog: pytest.LogCaptureFixture) -> None:
        before = answer(tied)
        edit_tensors(tied / "model.safetensors", lambda t: t.update({"lm_head.weight": torch.ones(SMALL_VOCAB, 64)}))
        with caplog.at_level(logging.WARNING, "nanoserve"):
            assert answer(tied) == before
        assert "lm_head" in caplog.text

    def test_untied_uses_its_own_head_wherever_it_lies(self, sharded: Path) -> None:
        assert answer(sharded) == their_answer(sharded)

    def test_untied_without_a_head_is_refused(self, single: Path) -> None:
        edit_tensors(single / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            load(single)


def put_theta_at_top(raw: dict[str, Any]) -> None:
    raw.pop("rope_parameters")
    raw |= {"rope_theta": 1e6, "rope_scaling": None}


def put_theta_in_both(raw: dict[str, Any]) -> None:
    raw["rope_theta"] = 1e6


def lower_theta(raw: dict[str, Any]) -> None:
    raw["rope_parameters"]["rope_theta"] = 1e4


def stretch(raw: dict[str, Any]) -> None:
    raw["rope_parameters"] = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip


def test_rope_in_the_old_place_the_new_place_and_both(single: Path) -> None:
    new_place = answer(single)
    for edit in (put_theta_in_both, put_theta_at_top):
        edit_config(single, edit)
        assert answer(single) == new_place == their_answer(single)


@pytest.mark.parametrize("edit", [lower_theta, stretch])
def test_rope_settings_are_read(single: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    before = answer(single)
    edit_config(single, edit)
    assert answer(single) == their_answer(single) != before


@pytest.mark.parametrize(
    "overrides",
    [{"attention_bias": True}, {"head_dim": 128}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}],
    ids=str,
)
def test_shapes_that_checkpoints_come_in(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = checkpoints.save(checkpoints.sens_model(seed=8, **overrides), tmp_path / "model")
    if "head_dim" in overrides:
        edit_config(folder, lambda raw: raw.pop("head_dim"))
    assert answer(folder) == their_answer(folder)


def test_float16_weights_are_computed_in_bfloat16(single: Path) -> None:
    edit_tensors(single / "model.safetensors", lambda t: t.update({name: x.half() for name, x in t.items()}))
    edit_config(single, lambda raw: raw.update(dtype="float16"))
    assert load(single).info.dtype == "bfloat16"


def test_another_architecture_is_refused_by_name(single: Path) -> None:
    edit_config(single, lambda raw: raw.update(model_type="qwen2", architectures=["Qwen2ForCausalLM"]))
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM"):
        load(single)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "no-slash", "a/b/c"])
def test_a_model_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        resolve_model(name)


def test_a_folder_without_config_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(str(tmp_path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="file"):
        resolve_model(str(file))
