"""The model's own defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanoserve.core.errors import CheckpointError
from nanoserve.text.defaults import GenerationDefaults


def load(folder: Path, generation: Any = None, config: Any = None, eos: int | None = None) -> GenerationDefaults:
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return GenerationDefaults.load(folder, eos)


def test_sampling_values_are_taken(tmp_path: Path) -> None:
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 7, "num_beams": 4}
    defaults = load(tmp_path, values)
    assert defaults.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults.max_new_tokens == 7


def test_do_sample_false_is_greedy_and_only_that(tmp_path: Path) -> None:
    defaults = load(tmp_path, {"do_sample": False, "top_k": 1, "temperature": 0.7, "repetition_penalty": 1.3})
    assert defaults.sampling == {"temperature": 0.0, "repetition_penalty": 1.3}


def test_no_file_means_no_defaults(tmp_path: Path) -> None:
    assert load(tmp_path) == GenerationDefaults()


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ids"),
    [
        ({"eos_token_id": [5, 3]}, {"eos_token_id": 9}, 5, (5, 3)),
        ({"eos_token_id": 4}, None, None, (4,)),
        ({"do_sample": True}, {"eos_token_id": 9}, None, (9,)),
        (None, {"eos_token_id": [9, 8]}, 7, (9, 8, 7)),
        (None, None, 7, (7,)),
        ({"eos_token_id": 0}, {"eos_token_id": 9}, None, (0,)),
    ],
)
def test_eos_ids(tmp_path: Path, generation: Any, config: Any, tokenizer: int | None, ids: tuple[int, ...]) -> None:
    assert load(tmp_path, generation, config, tokenizer).eos_token_ids == ids


@pytest.mark.parametrize(
    "generation", ["{", "[]", {"temperature": -1}, {"top_p": "x"}, {"eos_token_id": "x"}, {"max_new_tokens": -1}]
)
def test_a_damaged_file_is_named(tmp_path: Path, generation: Any) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json|eos_token_id"):
        load(tmp_path, generation)
