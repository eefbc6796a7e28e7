"""Which processes belong to a run, and their end. Standard library only: it also runs alone, as a watchdog.

Every process of a run inherits ``MARK`` in its environment, which is read from ``/proc``; elsewhere than on Linux
nothing is found, and Ray's own shutdown has to do.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "NANOSERVE_RUN_DIR"
_MODULE = "nanoserve.serving.processes"


def environment(run_dir: Path) -> dict[str, str]:
    """What the processes of the run have to inherit. Ray's workers rename themselves, and would by default overwrite
    their environment with the new name."""
    return {MARK: str(run_dir), "SPT_NOENV": "1"}


def of_run(run_dir: Path) -> list[int]:
    """Process ids that belong to the run, without the caller."""
    ids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")] if Path("/proc/self").exists() else []
    return [pid for pid in ids if pid != os.getpid() and _belongs(pid, run_dir)]


def _belongs(pid: int, run_dir: Path) -> bool:
    try:
        return f"{MARK}={run_dir}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
        return False


def end(run_dir: Path, *, patience_s: float = 2.0) -> None:
    """Asks every process of the run to end, then makes it."""
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        give_up_s = time.monotonic() + wait_s
        for pid in of_run(run_dir):
            _signal(pid, number)
        while of_run(run_dir) and time.monotonic() < give_up_s:
            time.sleep(0.05)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return


class Watchdog:
    """A small process that ends the run if this one dies without doing so: it sees the pipe between them close."""

    def __init__(self, run_dir: Path) -> None:
        """To be made before ``MARK`` is set, or it would end itself."""
        command = [sys.executable, "-m", _MODULE, str(run_dir)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def dismiss(self) -> None:
        """The run has ended well."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"done")
            self._process.stdin.close()
        except OSError:
            return
        self._process.wait(10)


def _watch(run_dir: Path) -> None:
    if sys.stdin.buffer.read() != b"done":
        end(run_dir)
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]))
