"""Where requests with shared prefixes go: our routing beside least load, power of two choices and consistent hashing.

    python -m benchmarks.routing

Virtual time over the real scheduler, block pool, prefix index and policy; only the model is made up (see
``observe.simulate``). Power of two
choices and consistent hashing (on the session, as Serve's router of that name does) are what Ray Serve ships, written
in their textbook form on the same load figures. ``hit_share`` is the share of reachable hit tokens: those that one
replica with endless blocks would find. ``load_imbalance`` is the busiest replica's busy seconds over the mean.
"""

import argparse
import random
from bisect import bisect
from collections.abc import Iterator
from zlib import crc32

from benchmarks.report import table, write
from nanoserve.core.config import SchedulerConfig
from nanoserve.core.request import GenerateRequest
from nanoserve.observe.simulate import Chooser, CostModel, DoorChooser, Fleet, Replica, reachable, report
from nanoserve.observe.trace import Chats
from nanoserve.routing.kv_index import PrefixChain

BLOCK_SIZE = 16
CONFIG = SchedulerConfig(num_blocks=6000, block_size=BLOCK_SIZE, max_num_seqs=64, max_model_len=8192)


class Bookings:
    """What those of the others know of the replicas: how many requests each has."""

    def __init__(self, num_replicas: int) -> None:
        self.booked = {f"replica-{number}": 0 for number in range(num_replicas)}

    def sent(self, replica: Replica, chain: PrefixChain) -> None:
        self.booked[replica.key] = replica.num_booked

    def heard(self, replica: Replica, settled: list[PrefixChain]) -> None:
        self.booked[replica.key] = replica.num_booked


class LeastLoad(Bookings):
    """The fewest requests, ties by the request's hash."""

    def choices(self, request: GenerateRequest, chain: PrefixChain) -> Iterator[str]:
        id_ = request.request_id
        return iter(sorted(self.booked, key=lambda key: (self.booked[key], crc32(f"{id_}{key}".encode()))))


class PowerOfTwo(Bookings):
    """Two at random, the shorter queue of them (Mitzenmacher 2001), as Serve's default router."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._rng = random.Random(1)

    def choices(self, request: GenerateRequest, chain: PrefixChain) -> Iterator[str]:
        while True:
            yield min(self._rng.sample(list(self.booked), 2), key=lambda key: self.booked[key])


class ConsistentHash(Bookings):
    """A ring of 100 points a replica (Karger et al. 1997), the session's place on it."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._ring = sorted((crc32(f"{key}#{point}".encode()), key) for key in self.booked for point in range(100))

    def choices(self, request: GenerateRequest, chain: PrefixChain) -> Iterator[str]:
        place = bisect(self._ring, (crc32(request.session_id.encode()), ""))
        for step in range(len(self._ring)):
            yield self._ring[(place + step) % len(self._ring)][1]


def measure(trace: Chats, num_replicas: int, chooser: Chooser) -> dict[str, float]:
    fleet = Fleet(num_replicas, CONFIG, CostModel(), chooser)
    fleet.play(trace.arrivals())
    figures = report(fleet)
    return {name: figures[name] for name in ("hit_tokens", "load_imbalance", "ttft_p50_ms", "ttft_p99_ms")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=3000)
    args = parser.parse_args()
    trace = Chats(num_requests=args.requests, requests_per_s=10.0 * args.replicas)
    ways: dict[str, Chooser] = {
        "nanoserve": DoorChooser(),
        "nanoserve, session header": DoorChooser(sessions=True),
        "least load": LeastLoad(args.replicas),
        "power of two choices": PowerOfTwo(args.replicas),
        "consistent hash of the session": ConsistentHash(args.replicas),
    }
    most = reachable(trace.arrivals(), BLOCK_SIZE)
    rows = {}
    for name, choose in ways.items():
        figures = measure(trace, args.replicas, choose)
        rows[name] = {"hit_share": figures.pop("hit_tokens") / most, **figures}
    print(table(rows))
    print(f"written: {write('routing', {'replicas': args.replicas, 'requests': args.requests, 'rows': rows}).name}")


if __name__ == "__main__":
    main()
