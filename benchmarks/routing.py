"""Where requests with shared prefixes go: our routing beside least load, power of two choices and consistent hashing.

    python -m benchmarks.routing

Virtual time over the real scheduler, block pool, prefix index and policy; only the model is made up: a step takes
``STEP_S`` plus ``PREFILL_TOKEN_S`` for each prompt token and ``DECODE_S`` for each running request. Power of two
choices and consistent hashing (on the session, as Serve's router of that name does) are what Ray Serve ships, written
in their textbook form on the same load figures. ``hit_share`` is the share of reachable hit tokens: those that one
replica with endless blocks would find. ``load_imbalance`` is the busiest replica's busy seconds over the mean.
"""

import argparse
import heapq
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from zlib import crc32

from benchmarks.report import percentile, table, write
from nanoserve.core.config import SchedulerConfig
from nanoserve.core.plan import ModelRunnerOutput, SampledTokens, SchedulerOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.routing.kv_index import KVIndex, PrefixChain
from nanoserve.routing.policy import Demand, EngineLoad, rank
from nanoserve.scheduler.scheduler import Scheduler

STEP_S, PREFILL_TOKEN_S, DECODE_S = 0.010, 0.0001, 0.0003
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Sessions that share system prompts: a session's turn is its last prompt, the answer, and something new."""

    num_requests: int = 3000
    num_systems: int = 40
    num_sessions: int = 240
    requests_per_s: float = 40.0
    num_blocks: int = 6000
    seed: int = 0

    def arrivals(self) -> list[tuple[float, GenerateRequest]]:
        rng = random.Random(self.seed)
        systems = [_tokens(rng, rng.randrange(256, 1537, 16)) for _ in range(self.num_systems)]
        popularity = [1 / (place + 1) for place in range(self.num_systems)]
        said = [list(rng.choices(systems, popularity)[0]) for _ in range(self.num_sessions)]
        now_s, arrivals = 0.0, []
        for number in range(self.num_requests):
            now_s += rng.expovariate(self.requests_per_s)
            session = rng.randrange(self.num_sessions)
            if len(said[session]) > 3000:
                said[session] = list(rng.choices(systems, popularity)[0])
            said[session] += _tokens(rng, rng.randrange(16, 129))
            num_output = rng.randrange(8, 65)
            sampling = SamplingParams(max_tokens=num_output, seed=0, temperature=0)
            request = GenerateRequest(
                request_id=f"r{number}",
                prompt_token_ids=tuple(said[session]),
                sampling=sampling,
                session_id=f"s{session}",
            )
            arrivals.append((now_s, request))
            said[session] += [_answer(number, index) for index in range(num_output)]
        return arrivals


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(length)]


def _answer(number: int, index: int) -> int:
    return (number * 7919 + index * 104_729) % 100_000


class Replica:
    """One engine in virtual time."""

    def __init__(self, key: str, num_blocks: int) -> None:
        config = SchedulerConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=64, max_model_len=8192)
        self.key = key
        self.scheduler = Scheduler(config)
        self.stats = self.scheduler.stats()
        self.booked: set[str] = set()
        self.num_said: dict[str, int] = {}
        self.busy_s = 0.0
        self.is_stepping = False
        self._plan: SchedulerOutput | None = None

    def load(self) -> EngineLoad:
        return EngineLoad.of(self.key, self.stats, num_booked=len(self.booked))

    def begin(self) -> float:
        """Plans a step; the seconds that it takes."""
        self._plan = plan = self.scheduler.schedule()
        num_sampling = sum(request.num_samples > 0 for request in plan.scheduled)
        seconds = STEP_S + PREFILL_TOKEN_S * (plan.num_tokens - num_sampling) + DECODE_S * num_sampling
        self.busy_s += seconds
        return seconds

    def end(self) -> list[str]:
        """Accounts for the step; the requests that got their first token."""
        assert self._plan is not None
        first, sampled = [], {}
        for request in self._plan.scheduled:
            if request.num_samples:
                index = self.num_said.get(request.request_id, 0)
                self.num_said[request.request_id] = index + 1
                first += [] if index else [request.request_id]
                sampled[request.request_id] = SampledTokens((_answer(int(request.request_id[1:]), index),))
        outputs = self.scheduler.update(self._plan, ModelRunnerOutput(step_id=self._plan.step_id, sampled=sampled))
        self.booked -= {output.request_id for output in outputs if output.finish_reason}
        self.stats = self.scheduler.stats()
        return first


Choose = Callable[[Sequence[Replica], GenerateRequest, PrefixChain], Replica]


class Prefixes:
    """nanoserve: the index and the policy that the door uses."""

    def __init__(self, *, sessions: bool) -> None:
        self.index = KVIndex()
        self._sessions = sessions

    def __call__(self, replicas: Sequence[Replica], request: GenerateRequest, chain: PrefixChain) -> Replica:
        demand = Demand(
            num_tokens=len(request.prompt_token_ids),
            tie=f"{next(iter(chain), 0):x}",
            session_id=request.session_id if self._sessions else "",
            hit_tokens=self.index.hit_tokens(chain),
        )
        best = rank([replica.load() for replica in replicas], demand)[0].key
        return next(replica for replica in replicas if replica.key == best)


def least_load(replicas: Sequence[Replica], request: GenerateRequest, chain: PrefixChain) -> Replica:
    return min(
        replicas, key=lambda replica: (len(replica.booked), crc32(f"{request.request_id}{replica.key}".encode()))
    )


class PowerOfTwo:
    """Two at random, the shorter queue of them (Mitzenmacher 2001), as Serve's default router."""

    def __init__(self) -> None:
        self._rng = random.Random(1)

    def __call__(self, replicas: Sequence[Replica], request: GenerateRequest, chain: PrefixChain) -> Replica:
        return min(self._rng.sample(list(replicas), 2), key=lambda replica: len(replica.booked))


class ConsistentHash:
    """A ring of 100 points a replica (Karger et al. 1997), the session's place on it."""

    def __init__(self) -> None:
        self._ring: list[tuple[int, int]] = []

    def __call__(self, replicas: Sequence[Replica], request: GenerateRequest, chain: PrefixChain) -> Replica:
        if not self._ring:
            places = ((crc32(f"{r.key}#{point}".encode()), i) for i, r in enumerate(replicas) for point in range(100))
            self._ring = sorted(places)
        place = bisect(self._ring, (crc32(request.session_id.encode()), 0)) % len(self._ring)
        return replicas[self._ring[place][1]]


@dataclass(slots=True)
class Run:
    """Replays a trace."""

    replicas: list[Replica]
    choose: Choose
    chains: dict[str, tuple[Replica, PrefixChain]] = field(default_factory=dict)
    sent_s: dict[str, float] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)

    def play(self, arrivals: Sequence[tuple[float, GenerateRequest]]) -> None:
        order = count()
        events: list[tuple[float, int, Replica | GenerateRequest]] = [(s, next(order), r) for s, r in arrivals]
        heapq.heapify(events)
        while events:
            now_s, _, what = heapq.heappop(events)
            if isinstance(what, GenerateRequest):
                replica = self._send(what, now_s)
            else:
                replica = what
                self._heard(replica, now_s)
            if not replica.is_stepping and replica.scheduler.has_work:
                replica.is_stepping = True
                heapq.heappush(events, (now_s + replica.begin(), next(order), replica))

    def _send(self, request: GenerateRequest, now_s: float) -> Replica:
        chain = PrefixChain(request.prompt_token_ids, block_size=BLOCK_SIZE, salts=("", "", ""))
        replica = self.choose(self.replicas, request, chain)
        replica.booked.add(request.request_id)
        replica.scheduler.add(request)
        self.sent_s[request.request_id] = now_s
        self.chains[request.request_id] = replica, chain
        if isinstance(self.choose, Prefixes):
            self.choose.index.expect(replica.key, chain)
        return replica

    def _heard(self, replica: Replica, now_s: float) -> None:
        first = replica.end()
        replica.is_stepping = False
        self.ttft_s += [now_s - self.sent_s[request_id] for request_id in first]
        if isinstance(self.choose, Prefixes):
            index = self.choose.index
            index.update(replica.key, replica.stats.blocks_published, replica.stats.blocks_evicted)
            for request_id in first:
                index.settle(*((self.chains[request_id][0].key), self.chains[request_id][1]))


def measure(trace: Trace, num_replicas: int, choose: Choose) -> dict[str, float]:
    replicas = [Replica(f"replica-{number}", trace.num_blocks) for number in range(num_replicas)]
    if isinstance(choose, Prefixes):
        for replica in replicas:
            choose.index.reset(replica.key, ())
    run = Run(replicas, choose)
    run.play(trace.arrivals())
    busy = [replica.busy_s for replica in replicas]
    return {
        "hit_tokens": float(sum(replica.stats.num_cached_tokens_total for replica in replicas)),
        "load_imbalance": max(busy) * len(busy) / sum(busy),
        "ttft_p50_ms": 1e3 * percentile(run.ttft_s, 0.5),
        "ttft_p99_ms": 1e3 * percentile(run.ttft_s, 0.99),
    }


def reachable(trace: Trace) -> float:
    """Hit tokens of one replica that forgets nothing and is told of every prompt in order."""
    seen: set[int] = set()
    total = 0
    for _, request in trace.arrivals():
        chain = list(PrefixChain(request.prompt_token_ids, block_size=BLOCK_SIZE, salts=("", "", "")))
        total += BLOCK_SIZE * next((depth for depth, key in enumerate(chain) if key not in seen), len(chain))
        answer = [_answer(int(request.request_id[1:]), index) for index in range(request.sampling.max_tokens or 0)]
        said = (*request.prompt_token_ids, *answer)
        seen.update(PrefixChain(said, block_size=BLOCK_SIZE, salts=("", "", "")))
    return float(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=3000)
    args = parser.parse_args()
    trace = Trace(num_requests=args.requests, requests_per_s=10.0 * args.replicas)
    ways: dict[str, Choose] = {
        "nanoserve": Prefixes(sessions=False),
        "nanoserve, session header": Prefixes(sessions=True),
        "least load": least_load,
        "power of two choices": PowerOfTwo(),
        "consistent hash of the session": ConsistentHash(),
    }
    most = reachable(trace)
    rows = {}
    for name, choose in ways.items():
        figures = measure(trace, args.replicas, choose)
        rows[name] = {"hit_share": figures.pop("hit_tokens") / most, **figures}
    print(table(rows))
    print(f"written: {write('routing', {'replicas': args.replicas, 'requests': args.requests, 'rows': rows}).name}")


if __name__ == "__main__":
    main()
