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


@pytest.mark.parametrize("what", ["rows", "attention", "experts", "blocks", "choose"])
def test_kernels_against_float64(what: str) -> None:
    interpreted(f"tests/model/kernels/interpreted/check_{what}.py")
