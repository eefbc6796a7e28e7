"""A run's processes are found by what they inherit, and all of them end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoserve.serving import processes

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def spawn(run_dir: Path, code: str = "print('up', flush=True); import time; time.sleep(60)") -> subprocess.Popen[bytes]:
    environment = os.environ | processes.environment(run_dir)
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    child.stdout.close()
    return child


def test_only_the_runs_own_processes_are_found(tmp_path: Path) -> None:
    mine, other = spawn(tmp_path / "a"), spawn(tmp_path / "ab")
    try:
        assert processes.of_run(tmp_path / "a") == [mine.pid]
    finally:
        for child in (mine, other):
            child.kill()
            child.wait()


def test_a_process_that_ignores_the_request_to_end_is_made_to(tmp_path: Path) -> None:
    children = [spawn(tmp_path), spawn(tmp_path, STUBBORN)]
    processes.end(tmp_path, patience_s=0.2)
    assert [child.wait(5) for child in children] == [-signal.SIGTERM, -signal.SIGKILL]


def test_the_watchdog_ends_the_run_of_a_killed_parent(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    child = spawn(run_dir)
    code = (
        "import sys; from pathlib import Path; from nanoserve.serving.processes import Watchdog\n"
        f"Watchdog(Path({str(run_dir)!r})); print('up', flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    parent.kill()
    parent.communicate()
    assert child.wait(20) == -signal.SIGTERM
    give_up_s = time.monotonic() + 10
    while run_dir.exists() and time.monotonic() < give_up_s:
        time.sleep(0.02)
    assert not run_dir.exists()


def test_a_dismissed_watchdog_touches_nothing(tmp_path: Path) -> None:
    watchdog = processes.Watchdog(tmp_path)
    child = spawn(tmp_path)
    watchdog.dismiss()
    assert child.poll() is None
    assert tmp_path.exists()
    child.kill()
    child.wait()
