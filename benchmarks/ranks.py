"""Times sums over the ranks of one machine: shared memory against Gloo, in turns.

    python -m benchmarks.ranks [--ranks 2] [--hidden 1024] [--rows 1 16 64 2048] [--repeat 400]
Microseconds of the wall clock for one bfloat16 sum of [rows, hidden] as rank 0 sees it, median and 99th percentile.
Ranks that outnumber the free cores measure the machine's scheduler. Writes benchmarks/results/ranks.json.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.report import percentile, table, write
from nanoserve.model.kernels.native import library
from nanoserve.model.parallel import Collective
from nanoserve.model.parallel.distributed import Distributed, Rendezvous
from nanoserve.model.parallel.shared_memory import SharedMemory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 2048])
    parser.add_argument("--repeat", type=int, default=400)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--join", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    native = library()
    assert native is not None, "shared memory needs the native kernels"
    torch.set_num_threads(1)
    native.set_threads(1)
    if args.rank:
        file, port = args.join
        store = Distributed.find(("127.0.0.1", port))
        compare(
            SharedMemory(native, file, args.rank, args.ranks), Distributed("gloo", store, args.rank, args.ranks), args
        )
        return
    file, meeting = SharedMemory.create(native, args.ranks), Rendezvous("127.0.0.1")
    others = [_start(rank, file, meeting.address[1]) for rank in range(1, args.ranks)]
    gloo = Distributed("gloo", meeting.store, 0, args.ranks)
    rows = compare(SharedMemory(native, file, 0, args.ranks), gloo, args)
    assert [other.wait() for other in others] == [0] * len(others)
    print(table(rows))
    print(f"written: {write('ranks', {'ranks': args.ranks, 'hidden': args.hidden, 'sums': rows}).name}")


def _start(rank: int, file: int, port: int) -> "subprocess.Popen[bytes]":
    words = [
        sys.executable,
        "-m",
        "benchmarks.ranks",
        *sys.argv[1:],
        "--rank",
        str(rank),
        "--join",
        str(file),
        str(port),
    ]
    return subprocess.Popen(words, pass_fds=[file], env=os.environ)


def compare(shared: Collective, gloo: Collective, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    rows = {}
    for count in args.rows:
        x = torch.zeros(count, args.hidden, dtype=torch.bfloat16)
        own, theirs = (_microseconds(each, x, max(20, args.repeat // count)) for each in (shared, gloo))
        rows[f"{count} rows"] = {
            "shared memory": percentile(own, 0.5),
            "p99": percentile(own, 0.99),
            "gloo": percentile(theirs, 0.5),
            "gloo p99": percentile(theirs, 0.99),
        }
    return rows


def _microseconds(collective: Collective, x: torch.Tensor, repeat: int) -> Sequence[float]:
    times = []
    for _ in range(repeat):
        began_s = time.perf_counter()
        collective.sum(x)
        times.append(1e6 * (time.perf_counter() - began_s))
    return times[repeat // 10 :]


if __name__ == "__main__":
    main()
