"""The memory of the KV tiers: copies in order, a disk that is found out when it lies, the same tokens."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError, EngineDeadError
from nanoserve.core.outputs import StepStats
from nanoserve.core.plan import BlockCopy
from nanoserve.engine.core import EngineCore
from nanoserve.model.build import build
from nanoserve.model.kernels.native import library
from nanoserve.model.kv_tiers import DiskTier, KVTiers
from tests.cases.rig import Rig
from tests.engine.driving import make_request

BLOCK_BYTES = 2 * 2 * 16 * 2 * 32 * 4  # layers, key and value, tokens, KV heads, head_dim, float32
STORES = ("device", "host", "disk")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Rig(tmp_path_factory.mktemp("rig")).sens()


def tiers_over(pool: torch.Tensor, path: Path, num_blocks: int = 6) -> KVTiers:
    disk = DiskTier(str(path), num_blocks=num_blocks, block_bytes=pool[0].nbytes)
    return KVTiers(pool, num_host_blocks=num_blocks, disk=disk)


def down(slot: int) -> BlockCopy:
    return BlockCopy(source_block_id=slot, target_block_id=slot, source="host", target="disk")


def up(slot: int, target: int) -> BlockCopy:
    return BlockCopy(source_block_id=slot, target_block_id=target, source="disk", target="host")


def test_copies_of_one_step_act_as_if_made_one_by_one(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(50):
        pool = torch.arange(6.0).repeat_interleave(8).view(6, 2, 4)
        tiers = tiers_over(pool, tmp_path)
        held: dict[tuple[str, int], float] = {("device", i): float(i) for i in range(6)}
        copies: list[BlockCopy] = []
        for _ in range(20):  # the disk is only written here: its reads may come late
            source, target = rng.choice(
                [("device", "host"), ("host", "device"), ("device", "device"), ("host", "disk")]
            )
            place = rng.choice([i for name, i in held if name == source] or [-1])
            if place >= 0:
                copies.append(
                    BlockCopy(source_block_id=place, target_block_id=rng.randrange(6), source=source, target=target)
                )
                held[target, copies[-1].target_block_id] = held[source, place]
        tiers.start(copies)
        assert tiers.finish() == ()
        on_disk = [slot for name, slot in held if name == "disk"]
        tiers.start([up(slot, slot) for slot in on_disk])
        assert tiers.finish() == ()
        tiers.start([BlockCopy(source_block_id=s, target_block_id=s, source="host") for s in on_disk])
        expected = {i: held["disk", i] if i in on_disk else held["device", i] for i in range(6)}
        assert pool[:, 0, 0].tolist() == [expected[i] for i in range(6)]
        assert bool((pool == pool[:, :1, :1]).all())
        tiers.close()


def test_what_the_disk_gives_back_differently_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = torch.rand(4, 2, 8)
    tiers = tiers_over(pool, tmp_path)
    tiers.start([BlockCopy(source_block_id=i, target_block_id=i, target="host") for i in range(4)])
    tiers.start([down(i) for i in range(4)])
    assert tiers._disk is not None
    os.pwrite(tiers._disk._file.fileno(), b"\xff", 2 * pool[0].nbytes + 5)
    copies = [up(i, i) for i in range(4)]
    tiers.start(copies)
    assert tiers.finish() == (copies[2],)
    assert tiers.finish() == (), "told once"
    assert "slot=2" in caplog.text
    tiers.close()


def test_a_slot_that_was_never_written_is_lost(tmp_path: Path) -> None:
    tiers = tiers_over(torch.zeros(1, 2, 8), tmp_path)
    tiers.start([up(0, 0)])
    assert len(tiers.finish()) == 1
    tiers.close()


def test_the_file_leaves_nothing_behind_and_a_full_disk_loses_blocks_only(tmp_path: Path) -> None:
    tiers = tiers_over(torch.rand(4, 2, 8), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert tiers._disk is not None
    with open("/dev/full", "r+b", buffering=0) as full:
        os.dup2(full.fileno(), tiers._disk._file.fileno())
    tiers.start([down(1)])
    assert tiers.finish() == (down(1),)
    tiers.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_host_memory": 10}, "at least one block"),
        ({"kv_host_memory": "1MiB", "kv_disk_path": "/nowhere", "kv_disk_memory": "1MiB"}, "folder"),
        ({"kv_host_memory": "1MiB", "kv_disk_path": "/tmp"}, "together"),
        ({"kv_disk_path": "/tmp", "kv_disk_memory": "1MiB"}, "needs `kv_host_memory`"),
        ({"kv_host_memory": "1MiB", "enable_prefix_caching": False}, "prefix caching"),
        (
            {"kv_host_memory": "1MiB", "kv_disk_path": "/tmp", "kv_disk_memory": "1MiB", "tensor_parallel_size": 2},
            "not built for several ranks",
        ),
    ],
)
def test_tiers_that_cannot_be_are_refused(folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(EngineArgs(model=str(folder), kv_cache_memory="1MiB", **settings))


def test_memory_that_does_not_suffice_is_told_with_what_it_went_into(folder: Path, monkeypatch: Any) -> None:
    with pytest.raises(ConfigError, match=r"weights 0\.\d+ GiB, KV cache \d+\.\d+ GiB"):
        build(EngineArgs(model=str(folder), kv_cache_memory="900TiB"))
    loaded = build(EngineArgs(model=str(folder), kv_cache_memory="1GiB"))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    runner: Any = loaded.runner
    monkeypatch.setattr(runner._backend, "prepare", fail)
    core = EngineCore(loaded.runner, loaded.scheduler)
    core.add(make_request("r", 3))
    with pytest.raises(EngineDeadError, match=r"Out of memory in a step: .*KV cache 1\.00 GiB"):
        core.step()
    core.close()


def answers(folder: Path, **settings: Any) -> tuple[list[tuple[int, ...]], StepStats]:
    """Three rounds over prompts that share stems: together far more blocks than a small pool has."""
    rng = random.Random(3)
    stems = [[rng.randrange(400) for _ in range(64)] for _ in range(4)]
    prompts = [[*stem, *(rng.randrange(400) for _ in range(24))] for stem in stems for _ in range(2)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found: list[tuple[int, ...]] = []
    with LLM(str(folder), max_model_len=160, max_num_batched_tokens=64, **settings) as llm:
        for _ in range(3):
            results = llm.generate(prompts, params, use_tqdm=False)
            found += [result.outputs[0].token_ids for result in results]
        return found, llm._core.scheduler.stats()


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_tokens_do_not_depend_on_the_tiers(folder: Path, tmp_path: Path, dtype: str) -> None:
    if dtype == "int8" and library() is None:
        pytest.skip("int8 KV needs the native kernels")
    roomy, stats = answers(folder, kv_cache_memory="4MiB", kv_cache_dtype=dtype)
    assert stats.num_preemptions_total == 0
    block_bytes = BLOCK_BYTES if dtype == "auto" else BLOCK_BYTES * 36 // 128
    pool = {"kv_cache_memory": 12 * block_bytes, "kv_cache_dtype": dtype}
    small, stats = answers(folder, **pool)
    assert small == roomy
    few_cached = stats.num_cached_tokens_total
    for num_host_blocks, num_disk_blocks in ((100, 0), (4, 100)):
        disk = (
            {"kv_disk_path": str(tmp_path), "kv_disk_memory": num_disk_blocks * block_bytes} if num_disk_blocks else {}
        )
        tiered, stats = answers(folder, kv_host_memory=num_host_blocks * block_bytes, **disk, **pool)
        assert tiered == roomy
        assert (stats.num_host_blocks, stats.num_disk_blocks) == (num_host_blocks, num_disk_blocks)
        assert stats.num_brought_up_blocks_total > 0
        assert bool(stats.num_fetched_blocks_total) == bool(num_disk_blocks)
        assert stats.num_lost_blocks_total == 0
        if num_host_blocks == 100:
            assert stats.num_cached_tokens_total >= 2 * few_cached


def test_ranks_share_the_host_tier_out(folder: Path) -> None:
    roomy, _ = answers(folder, kv_cache_memory="4MiB")
    sizes = {"kv_cache_memory": 12 * BLOCK_BYTES, "kv_host_memory": 100 * BLOCK_BYTES}
    tiered, stats = answers(folder, tensor_parallel_size=2, **sizes)
    assert tiered == roomy
    assert (stats.num_host_blocks, stats.num_blocks) == (100, 12)
    assert stats.num_brought_up_blocks_total > 0
