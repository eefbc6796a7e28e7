"""Runs every step of ``benchmarks/gpu/steps.py`` in a process of its own under one deadline, and keeps what they found.

    benchmarks/gpu/run.sh [--only NAME ...] [--seconds 460] [--rehearse]

After each step benchmarks/results/gpu.json is written again, so that whatever ends the run leaves what it had. A step
that fails or takes too long is recorded with its last words, and the next one runs. ``--rehearse`` runs tiny sizes on a
CPU in Triton's interpreter: every line but those about CUDA, and no figure that means anything; it writes no file.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.steps import LIMITS_S
from benchmarks.report import write

_REHEARSAL_SLOWER = 5  # than the limits are meant for
_LAST_WORDS = 1500  # characters of a failed step's output that are kept


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 when a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(arguments)
    deadline_s = time.monotonic() + args.seconds
    found: dict[str, Any] = {}
    for name in args.only:
        left_s = deadline_s - time.monotonic()
        limit_s = min(LIMITS_S[name] * (_REHEARSAL_SLOWER if args.rehearse else 1), left_s)
        found[name] = _run(name, limit_s, args.rehearse) if left_s > 1 else {"error": "no time left"}
        print(f"{name}: {json.dumps(found[name])}", flush=True)
        if not args.rehearse:
            write("gpu", {"steps": found})
    return 1 if any("error" in result for result in found.values()) else 0


def _run(name: str, limit_s: float, rehearses: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.steps", name]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if rehearses else {})
    began_s = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as late:
        words = late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else late.stderr or ""
        return {"error": f"stopped after {limit_s:.0f} s", "last_words": words[-_LAST_WORDS:]}
    took_s = round(time.monotonic() - began_s, 1)
    if done.returncode:
        return {"error": f"exit status {done.returncode}", "took_s": took_s, "last_words": done.stderr[-_LAST_WORDS:]}
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "took_s": took_s}


if __name__ == "__main__":
    sys.exit(main())
