"""``deterministic``: the logits of a request are the same to the last bit alone and in any company, chunk and batch."""

import random
from pathlib import Path
from typing import Any

import pytest

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError
from nanoserve.core.sampling import SamplingParams
from nanoserve.model.build import LoadedModel, build
from nanoserve.model.kernels.native import dispatch, library, why_not
from tests import checkpoints
from tests.model.driver import Driver, Habits

_HABITS = [
    Habits(max_batch=1),
    Habits(),
    Habits(max_chunk=7, max_batch=5, reuse_prefixes=True),
    Habits(max_chunk=50, max_batch=9, preempt_one_in=20, seed=1),
]


def load(folder: Path, **overrides: Any) -> LoadedModel:
    settings: dict[str, Any] = {"model": str(folder), "kv_cache_memory": "2MiB", "max_num_seqs": 16}
    return build(EngineArgs(**(settings | {"deterministic": True} | overrides)))


@pytest.fixture(scope="module", params=["dense", "moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = checkpoints.sens_model() if request.param == "dense" else checkpoints.sens_moe_model()
    return checkpoints.save(model, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_log_probabilities_are_equal_bit_for_bit_in_any_company(folder: Path, quantization: str, dtype: str) -> None:
    if library() is None:
        pytest.skip(why_not())
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.choice((1, 5, 30, 70)))] for _ in range(9)]
    wanted = [SamplingParams(temperature=0, seed=0, max_tokens=6, logprobs=1, prompt_logprobs=0)] * len(prompts)
    runs = []
    for habits in _HABITS:
        loaded = load(folder, quantization=quantization, dtype=dtype)
        runs.append([(r.token_ids, r.logprobs) for r in Driver(loaded, habits).run(prompts, wanted)])
    assert all(run == runs[0] for run in runs[1:])


def test_what_cannot_be_deterministic_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is not None:
        with pytest.raises(ConfigError, match="the attention backend is cpu"):
            load(folder, attention_backend="cpu")
    monkeypatch.setenv(dispatch.VARIABLE, "off")
    with pytest.raises(ConfigError, match="NANOSERVE_CPU_ISA is off") as caught:
        load(folder)
    assert caught.value.param == "deterministic"
