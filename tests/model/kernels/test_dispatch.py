"""Compiling, choosing and loading the native kernels, and the threads they run on."""

import logging
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from nanoserve.core.errors import ConfigError
from nanoserve.model import threads
from nanoserve.model.kernels.native import build, dispatch, memory, why_not
from nanoserve.model.kernels.native.dispatch import Library


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for function in (dispatch._choose, dispatch._load):
        monkeypatch.setattr(dispatch, function.__name__, function.__wrapped__)
    return monkeypatch


def test_off_means_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "off")
    assert dispatch.library() is None
    assert why_not() == "NANOSERVE_CPU_ISA is off"


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "sse9")
    with pytest.raises(ConfigError, match="auto, off or one of: amx, avx512bf16, avx512, avx2"):
        dispatch.library()


def test_a_level_that_the_cpu_lacks_is_refused_when_forced_and_passed_over_when_not(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(dispatch, "_cpu_flags", lambda: frozenset({"sse2"}))
    fresh.setenv(dispatch.VARIABLE, "avx2")
    with pytest.raises(ConfigError, match="the CPU has no avx2"):
        dispatch.library()
    fresh.setenv(dispatch.VARIABLE, "auto")
    assert dispatch.library() is None
    assert "the CPU has no" in why_not()


def test_an_install_without_a_compiler_works_and_warns(
    fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.delenv(dispatch.VARIABLE, raising=False)
    fresh.setattr(dispatch, "_cpu_flags", lambda: build.LEVELS["avx2"].cpu_flags)
    fresh.setattr(dispatch, "object_path", lambda level: tmp_path / f"cpu_{level}.so")
    with caplog.at_level(logging.WARNING, "nanoserve"):
        assert dispatch.library() is None
    assert "native kernels off" in caplog.text
    assert "not compiled" in caplog.text


def test_a_missing_compiler_and_a_compiler_error_are_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in (build.compile_level("avx2", tmp_path / "x.so") or "")
    monkeypatch.setenv("CXX", "false")
    assert build.compile_level("avx2", tmp_path / "x.so") is not None
    assert not list(tmp_path.iterdir())


def test_a_broken_object_is_no_crash(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"not an object")
    fresh.setattr(dispatch, "object_path", lambda level: tmp_path / "broken.so")
    fresh.setattr(dispatch, "_cpu_flags", lambda: build.LEVELS["avx2"].cpu_flags)
    assert "cannot be loaded" in dispatch._load("avx2").reason


def test_an_object_of_other_sources_is_not_used(
    native: Library, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setattr(dispatch, "revision", lambda: 0)
    fresh.setenv(dispatch.VARIABLE, "auto")
    with caplog.at_level(logging.WARNING, "nanoserve"):
        assert dispatch.library() is None
    assert "compiled from other sources" in caplog.text


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_pool_does_every_item_once_under_concurrent_callers(native: Library, count: int) -> None:
    count_items, num_threads = native.bind("ns_count", "pl"), native.bind("ns_threads", "")()
    native.set_threads(count)
    counts = [torch.zeros(size, dtype=torch.int64) for size in (1, 2, 17, 1000)]

    def run(own: torch.Tensor) -> None:
        for _ in range(300):
            count_items(own.data_ptr(), len(own))

    callers = [threading.Thread(target=run, args=(own,)) for own in counts]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    native.set_threads(num_threads)
    assert all((own == 300).all() for own in counts)


def test_threads_follow_the_limit_of_the_control_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "_CGROUP", tmp_path)
    monkeypatch.setattr(threads, "_CPUS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert threads.default_threads() == 8
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert threads.default_threads() == 3
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert threads.default_threads() == 1


def test_threads_are_cores_of_one_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "_CGROUP", tmp_path)
    monkeypatch.setattr(threads, "_CPUS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    for cpu in range(12):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / f"node{cpu % 2}").mkdir()
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu // 4 * 4 + cpu % 2}\n")
    assert threads.default_threads() == 3  # 12 hardware threads, 2 a core, 2 nodes


@pytest.mark.parametrize("shape", [(3,), (0, 4), (1024, 2048)])
def test_memory_is_zeroed_and_aligned(shape: tuple[int, ...]) -> None:
    tensor = memory.zeros(shape, torch.bfloat16)
    assert tensor.shape == shape
    assert not tensor.any()
    if tensor.nbytes >= 2**21:
        assert tensor.data_ptr() % 2**21 == 0
        tensor += 1
        assert tensor.sum(dtype=torch.float64) == tensor.numel()


def test_the_command_compiles_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "object_path", lambda level: tmp_path / f"cpu_{level}.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main(["avx2"]) == 1
    with pytest.raises(SystemExit):
        build.main(["avx9"])
    monkeypatch.delenv("CXX")
    try:
        subprocess.run(["g++", "--version"], capture_output=True, check=True)
    except OSError:
        pytest.skip("no g++ on this machine")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "empty.cpp")
    build.SOURCE.write_text("int nothing;\n")
    assert build.main(["avx2"]) == 0
    assert [path.name for path in tmp_path.glob("*.so")] == ["cpu_avx2.so"]
