"""Triton's kernels on a CPU: in its interpreter, in a process of their own (a wild pointer ends it), and compiled."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


def interpreted(*arguments: str) -> None:
    """Runs pytest where kernels are interpreted; its report is this test's."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.parametrize("what", ["rows", "attention", "experts", "blocks", "choose", "flash_attn"])
def test_kernels_against_float64(what: str) -> None:
    interpreted(f"tests/model/kernels/interpreted/check_{what}.py")


def test_the_attention_backend_holds_under_the_tests_of_all_backends() -> None:
    interpreted("tests/model/test_attention.py", "-k", "triton")


def test_every_kernel_compiles_to_good_code(tmp_path: Path) -> None:
    """Without a GPU: no spills, shared memory within limits, tensor cores where they belong."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.aot"]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_measurements_of_a_gpu_can_be_rehearsed() -> None:
    command = [str(ROOT / "benchmarks/gpu/run.sh"), "--rehearse", "--only", "ceilings", "copies", "start"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["ceilings", "copies", "start"]


def test_the_whole_engine_is_greedy_as_transformers() -> None:
    interpreted("tests/model/kernels/interpreted/check_engine.py")
