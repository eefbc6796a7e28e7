"""The kernels' own tests again, on objects that were compiled with the address and undefined-behaviour sanitizers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoserve.model.kernels.native import build, dispatch

_RUN = """
import sys
from pathlib import Path
import pytest
from nanoserve.model.kernels.native import build, dispatch
dispatch.object_path = lambda level: build.object_path(level, Path(sys.argv[1]))
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", *sys.argv[2:]]))
"""
_TOO_SLOW = "chunks_company_and_threads"  # minutes with sanitizers; what it runs, others do in small
_SUBJECTS = ("choice", "experts", "fused", "integer", "linear", "native_attention")


def _levels() -> list[str]:
    """The best level of this CPU, and the one for CPUs without AVX-512."""
    usable = [level for level in build.LEVELS if build.LEVELS[level].cpu_flags <= dispatch._cpu_flags()]
    return sorted({usable[0], usable[-1]}) if usable else []


def _runtime(name: str) -> str | None:
    try:
        found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip() if Path(found.strip()).is_absolute() else None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_touch_no_memory_but_their_own(tmp_path: Path) -> None:
    runtime = [_runtime(name) for name in ("libasan.so", "libubsan.so")]
    if not all(runtime) or not (levels := _levels()):
        pytest.skip("no g++ with sanitizers, or no CPU for these kernels")
    for level in levels:
        assert build.compile_level(level, build.object_path(level, tmp_path), sanitize=True) is None
    folder = Path(__file__).parent
    tests = [str(file) for name in _SUBJECTS if (file := folder / f"test_{name}.py").is_file()]
    preload = " ".join(filter(None, runtime))
    environment = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(tmp_path), "-k", f"not {_TOO_SLOW}", *tests],
        env=os.environ | environment | {"PYTHONPATH": str(folder.parents[2])},
        cwd=folder.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "passed" in done.stdout
