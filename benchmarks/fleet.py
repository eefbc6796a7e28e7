"""A fleet in virtual time: 1,000 replicas and 100,000 requests a second through the real scheduler and routing code.

    python -m benchmarks.fleet                       # 10, 100 and 1,000 replicas, one virtual second each
    python -m benchmarks.fleet --plot                # with the plot (needs matplotlib)

Cost model: a step takes ``COST``'s seconds (about a 0.6B model on one large GPU: 6 ms, 10 us a prompt token, 50 us a
running request), replicas compute beside each other, and the one door hears of a step when it has ended; text, HTTP and
the network are free. Each replica gets 100 requests a second from its part of the sessions. ``hit_share`` is the share
of reachable hit tokens: those that one replica with endless blocks would find. ``load_imbalance`` is the busiest
replica's busy seconds over the mean. A decision is everything a door does to choose: it names the prompt's blocks,
looks them up and ranks; measured in CPU time. ``scan_*``: looking up
and ranking alone, with every replica ranked, on every 200th request.
"""

import argparse
import time
from collections.abc import Iterator

from benchmarks.report import RESULTS, percentile, table, write
from nanoserve.core.config import SchedulerConfig
from nanoserve.core.request import GenerateRequest
from nanoserve.observe.simulate import CostModel, DoorChooser, Fleet, Replica, reachable, report
from nanoserve.observe.trace import Chats
from nanoserve.routing.kv_index import PrefixChain
from nanoserve.routing.policy import Demand, rank

COST = CostModel(step_s=0.006, prefill_token_s=0.00001, decode_s=0.00005)
CONFIG = SchedulerConfig(num_blocks=2500, block_size=16, max_num_seqs=64, max_model_len=2048)
REQUESTS_PER_S = 100.0
_SCANNED = 200


class Compared(DoorChooser):
    """The door's choice, and now and then beside it a scan over all replicas as a measure."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_s: list[float] = []
        self.replicas: list[Replica] = []
        self._num_asked = 0

    def join(self, replica: Replica) -> None:
        super().join(replica)
        self.replicas.append(replica)

    def choices(self, request: GenerateRequest, chain: PrefixChain) -> Iterator[str]:
        self._num_asked += 1
        return super().choices(request, chain)

    def sent(self, replica: Replica, chain: PrefixChain) -> None:
        if self._num_asked % _SCANNED == 0:
            self._scan(chain)
        super().sent(replica, chain)

    def _scan(self, chain: PrefixChain) -> None:
        loads = [replica.load() for replica in self.replicas]
        began_s = time.thread_time()
        hits = self.board.kv.hit_tokens(chain)
        rank(loads, Demand(num_tokens=chain.num_tokens, tie="scan", hit_tokens=hits))
        self.scan_s.append(time.thread_time() - began_s)


def measure(num_replicas: int, seconds: float) -> dict[str, float]:
    trace = Chats(
        num_requests=int(REQUESTS_PER_S * num_replicas * seconds),
        requests_per_s=REQUESTS_PER_S * num_replicas,
        num_systems=10 * num_replicas,
        num_sessions=20 * num_replicas,
        system_tokens=(128, 512),
        turn_tokens=(16, 64),
        output_tokens=(8, 32),
        max_tokens=1000,
    )
    chooser = Compared()
    fleet = Fleet(num_replicas, CONFIG, COST, chooser)
    began_s = time.perf_counter()
    fleet.play(trace.arrivals())
    wall_s = time.perf_counter() - began_s
    figures = report(fleet)
    hit_share = figures.pop("hit_tokens") / reachable(trace.arrivals(), CONFIG.block_size)
    scans = {f"scan_p{share}_us": 1e6 * percentile(chooser.scan_s, share / 100) for share in (50, 99)}
    return {"hit_share": hit_share, **figures, **scans, "simulated_in_s": wall_s}


def plot(rows: dict[str, dict[str, float]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sizes = [int(name) for name in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for name, text in (("decision_p50_us", "p50"), ("decision_p99_us", "p99"), ("scan_p50_us", "p50, all ranked")):
        left.plot(sizes, [row[name] for row in rows.values()], marker="o", label=text)
    left.set(xscale="log", yscale="log", xlabel="replicas", ylabel="CPU time of a decision, us")
    left.legend()
    for name, text in (("hit_share", "share of reachable hit tokens"), ("load_imbalance", "busiest over mean")):
        right.plot(sizes, [row[name] for row in rows.values()], marker="o", label=text)
    right.set(xscale="log", xlabel="replicas", ylim=(0, None))
    right.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "fleet.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=1.0, help="virtual")
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    rows = {str(num_replicas): measure(num_replicas, args.seconds) for num_replicas in args.replicas}
    print(table(rows))
    path = write("fleet", {"seconds": args.seconds, "requests_per_s_and_replica": REQUESTS_PER_S, "rows": rows})
    print(f"written: {path.name}")
    if args.plot:
        plot(rows)


if __name__ == "__main__":
    main()
