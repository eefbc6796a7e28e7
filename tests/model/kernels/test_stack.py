"""All layers in one native call against the same layers one by one: equal to the last bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve.core.config import EngineArgs
from nanoserve.model.attention.base import ForwardBatch
from nanoserve.model.build import build
from nanoserve.model.kernels.native import Library
from tests import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = checkpoints.sens_model(seed=3, attention_bias=True)
    return checkpoints.save(model, tmp_path_factory.mktemp("sens"))


def a_batch(query_lens: list[int]) -> ForwardBatch:
    positions = np.concatenate([np.arange(count) for count in query_lens])
    tables = np.arange(16 * len(query_lens)).reshape(len(query_lens), 16)
    owners = np.repeat(np.arange(len(query_lens)), query_lens)
    return ForwardBatch(
        token_ids=torch.from_numpy(np.arange(len(positions)) * 7 % 500),
        positions=torch.from_numpy(positions),
        slot_blocks=torch.from_numpy(tables[owners, positions // 16]),
        slot_offsets=torch.from_numpy(positions % 16),
        query_lens=np.array(query_lens),
        kv_lens=np.array(query_lens),
        block_tables=tables,
    )


@pytest.mark.parametrize("query_lens", [[1], [3, 1, 20], [90, 40]], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
        {"dtype": "float32", "quantization": "int4"},
    ],
    ids=str,
)
def test_the_stack_equals_its_layers(
    native: Library, folder: Path, settings: dict[str, Any], query_lens: list[int]
) -> None:
    runner: Any = build(EngineArgs(model=str(folder), kv_cache_memory="2MiB", **settings)).runner
    network: Any = runner._network
    batch = a_batch(query_lens)

    def run() -> tuple[Tensor, Tensor]:
        runner._pool.blocks.zero_()
        hidden = network.forward(
            batch.token_ids, batch.positions, runner._beating_layers(), runner._backend.prepare(batch)
        )
        return hidden.clone(), runner._pool.blocks.clone()

    before = runner.num_beats
    assert network._stack is not None
    with torch.inference_mode():
        whole, whole_kv = run()
        assert runner.num_beats == before + 2
        network._stack = None
        single, single_kv = run()
    assert torch.equal(whole, single)
    assert torch.equal(whole_kv, single_kv)
    assert whole.isfinite().all()


def test_a_part_that_is_not_native_keeps_the_layers_apart(native: Library, folder: Path) -> None:
    for overrides in ({"attention_backend": "cpu"}, {"attention_backend": "reference"}):
        settings: dict[str, Any] = {"model": str(folder), "kv_cache_memory": "2MiB"} | overrides
        runner: Any = build(EngineArgs(**settings)).runner
        assert runner._network._stack is None
