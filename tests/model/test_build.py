"""Settings are met or refused by name before weights are read; memory decides how many blocks there are."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError
from nanoserve.model import kv_cache
from nanoserve.model.build import build
from nanoserve.model.kernels.native import library
from tests import checkpoints

BLOCK_BYTES = 2 * 2 * 16 * 2 * 32 * 4  # layers, key and value, tokens, KV heads, head_dim, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.sens_model(), tmp_path_factory.mktemp("sens"))


def args(folder: Path, **overrides: Any) -> EngineArgs:
    return EngineArgs(**({"model": str(folder), "kv_cache_memory": "1MiB"} | overrides))


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("tensor_parallel_size", 2, "must be 1"),
        ("tensor_parallel_size", 0, "must be >= 1"),
        ("quantization", "fp4", "not built yet"),
        ("device", "cuda", "cuda"),
        ("device", "tpu", "tpu"),
        ("dtype", "float16", "float16"),
        ("attention_backend", "triton", "triton"),
        ("kv_cache_dtype", "fp8", "auto or int8"),
        ("max_model_len", 5000, "4096"),
        ("max_model_len", 0, ">= 1"),
        ("block_size", 0, ">= 1"),
        ("num_threads", 0, ">= 1"),
        ("memory_fraction", 1.5, "memory_fraction"),
        ("kv_cache_memory", "lots", "memory size"),
        ("kv_cache_memory", 100, "at least"),
    ],
)
def test_a_setting_that_cannot_be_met_is_refused_by_name(folder: Path, flag: str, value: Any, words: str) -> None:
    settings = {flag: value} if flag != "memory_fraction" else {flag: value, "kv_cache_memory": None}
    with pytest.raises(ConfigError, match=words) as caught:
        build(args(folder, **settings))
    assert caught.value.param in (flag, None)


def test_settings_are_judged_before_weights_are_read(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.sens_model(), tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError):
        build(args(folder, attention_backend="triton"))


def test_the_pool_is_what_the_memory_buys(folder: Path) -> None:
    loaded = build(args(folder, kv_cache_memory=10 * BLOCK_BYTES + 1))
    assert loaded.scheduler.num_blocks == 10
    assert loaded.info.kv_bytes_per_token == BLOCK_BYTES // 16


def test_max_model_len_is_cut_to_the_pool_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanoserve"):
        loaded = build(args(folder, kv_cache_memory=10 * BLOCK_BYTES))
    assert loaded.scheduler.max_model_len == loaded.info.max_model_len == 160
    assert "max_model_len" in caplog.text


def test_max_model_len_stays_when_it_fits(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanoserve"):
        loaded = build(args(folder, kv_cache_memory="64MiB", max_model_len=100))
    assert loaded.scheduler.max_model_len == 100
    assert not caplog.text


def test_without_a_size_the_pool_is_no_larger_than_useful(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build(args(folder, kv_cache_memory=None, max_model_len=64, max_num_seqs=3))
    assert loaded.scheduler.num_blocks == 3 * 4
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 100 * BLOCK_BYTES)
    half = build(args(folder, kv_cache_memory=None, memory_fraction=0.5))
    assert half.scheduler.num_blocks == 50


def test_available_memory_respects_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_CGROUP", tmp_path)
    machine = kv_cache.available_memory()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    assert kv_cache.available_memory() == 500000 < machine
    (tmp_path / "memory.max").write_text("max\n")
    assert kv_cache.available_memory() > 500000


def test_info_tells_what_was_loaded_and_chosen(folder: Path) -> None:
    info = build(args(folder)).info
    assert (info.architecture, info.dtype, info.vocab_size) == ("Qwen3ForCausalLM", "float32", 512)
    assert info.num_parameters == sum(p.numel() for p in checkpoints.sens_model().parameters())
    assert info.weights_bytes == 4 * info.num_parameters
    chosen = "native" if library() is not None else "cpu"
    assert info.attention_backend == chosen
    assert [name for name, _ in info.attention_rejected] == ([] if chosen == "native" else ["native"])


def test_threads_are_set_when_asked(folder: Path) -> None:
    before = torch.get_num_threads()
    build(args(folder, num_threads=1))
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_the_torch_free_files_import_no_torch() -> None:
    files = ", ".join(f"nanoserve.model.{name}" for name in ("folder", "info", "config"))
    code = f"import sys, {files}; print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"
