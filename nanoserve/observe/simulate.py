"""A fleet in virtual time: the real scheduler and the real routing; only the model and the clock are made up.

Its cost model: a step takes ``CostModel``'s seconds, replicas compute beside each other, and a door knows of a step
when it has ended. Text, HTTP and the network cost nothing. So hit rates, balance and queueing are those of the code,
and latencies as good as the three figures of the cost model.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Protocol

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.errors import InvalidRequestError, QueueFullError
from nanoserve.core.plan import ModelRunnerOutput, SampledTokens, SchedulerOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.observe.latency import Figures, percentile
from nanoserve.observe.trace import Arrival, answer
from nanoserve.routing.board import Board
from nanoserve.routing.kv_index import PrefixChain
from nanoserve.routing.policy import Demand, EngineLoad
from nanoserve.scheduler.scheduler import Scheduler

_SALTS = ("", "", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step: ``step_s``, and for each prompt token and each running request that it computes."""

    step_s: float = 0.010
    prefill_token_s: float = 0.0001
    decode_s: float = 0.0003

    def seconds(self, plan: SchedulerOutput) -> float:
        num_sampling = sum(request.num_samples > 0 for request in plan.scheduled)
        return self.step_s + self.prefill_token_s * (plan.num_tokens - num_sampling) + self.decode_s * num_sampling


@dataclass(frozen=True, slots=True)
class News:
    """What a step brought: requests with their first token, and requests that ended."""

    first: list[str]
    ended: list[str]


class Replica:
    """One engine in virtual time."""

    def __init__(self, key: str, config: SchedulerConfig, cost: CostModel, clock: Callable[[], float]) -> None:
        self.key = key
        self.scheduler = Scheduler(config, clock=clock)
        self.stats = self.scheduler.stats()
        self.num_booked = 0
        self.busy_s = 0.0
        self.is_stepping = False
        self._cost = cost
        self._num_said: dict[str, int] = {}
        self._plan: SchedulerOutput | None = None

    def load(self) -> EngineLoad:
        return EngineLoad.of(self.key, self.stats, num_booked=self.num_booked)

    def begin(self) -> float:
        """Plans a step; the seconds that it takes."""
        self._plan = self.scheduler.schedule()
        seconds = self._cost.seconds(self._plan)
        self.busy_s += seconds
        return seconds

    def end(self) -> News:
        """Accounts for the step."""
        assert self._plan is not None
        first, sampled = [], {}
        for request in self._plan.scheduled:
            if request.num_samples:
                id_ = request.request_id
                index = self._num_said.get(id_, 0)
                self._num_said[id_] = index + 1
                if not index:
                    first.append(id_)
                sampled[id_] = SampledTokens((answer(int(id_[1:]), index),))
        outputs = self.scheduler.update(self._plan, ModelRunnerOutput(step_id=self._plan.step_id, sampled=sampled))
        ended = [output.request_id for output in outputs if output.finish_reason]
        for id_ in ended:
            self._num_said.pop(id_, None)
        self.num_booked -= len(ended)
        self.stats = self.scheduler.stats()
        return News(first, ended)


class Chooser(Protocol):
    """Who says where requests go."""

    def choices(self, request: GenerateRequest, chain: PrefixChain) -> Iterator[str]:
        """Keys of replicas, best first."""

    def sent(self, replica: Replica, chain: PrefixChain) -> None:
        """The request went there."""

    def heard(self, replica: Replica, settled: list[PrefixChain]) -> None:
        """A step of the replica ended; ``settled`` are the prompts that it has now told of."""


class DoorChooser:
    """nanoserve: what a door does (``serving.feed``), with its own board, index and policy."""

    def __init__(self, *, sessions: bool = False) -> None:
        self.board = Board()
        self._sessions = sessions

    def join(self, replica: Replica) -> None:
        self.board.kv.reset(replica.key, ())
        self.board.put(replica.load())

    def choices(self, request: GenerateRequest, chain: PrefixChain) -> Iterator[str]:
        demand = Demand(
            num_tokens=len(request.prompt_token_ids),
            tie=f"{next(iter(chain), 0):x}" if len(chain) else request.request_id,
            session_id=request.session_id if self._sessions else "",
            hit_tokens={},
        )
        return (load.key for load in self.board.choices(demand, self.board.kv.find(chain)))

    def sent(self, replica: Replica, chain: PrefixChain) -> None:
        self.board.kv.expect(replica.key, chain)
        self.board.put(replica.load())

    def heard(self, replica: Replica, settled: list[PrefixChain]) -> None:
        self.board.kv.update(replica.key, replica.stats.blocks_published, replica.stats.blocks_evicted)
        for prefix in settled:
            self.board.kv.settle(replica.key, prefix)
        self.board.put(replica.load())


@dataclass(slots=True)
class _Open:
    """A request on its way. ``chain``: until the door has heard of its blocks."""

    at_s: float
    chain: PrefixChain


@dataclass(slots=True)
class Record:
    """What a run was like, in seconds; ``decision_s`` is real CPU time, the rest is virtual."""

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    num_refused: int = 0
    end_s: float = 0.0


class Fleet:
    """Replicas behind one door, and the events to come."""

    def __init__(
        self, num_replicas: int, config: SchedulerConfig, cost: CostModel, chooser: Chooser | None = None
    ) -> None:
        self._now_s = 0.0
        names = [f"replica-{number}" for number in range(num_replicas)]
        self.replicas = {name: Replica(name, config, cost, lambda: self._now_s) for name in names}
        self.record = Record()
        self._block_size = config.block_size
        self._open: dict[str, _Open] = {}
        self._steps: list[tuple[float, int, Replica]] = []
        self._order = count()
        if chooser is None:
            chooser = DoorChooser()
        if isinstance(chooser, DoorChooser):
            for replica in self.replicas.values():
                chooser.join(replica)
        self.chooser = chooser

    def play(self, arrivals: Iterable[Arrival]) -> Record:
        """Runs until every request has ended; ``arrivals`` in order of time."""
        for arrival in arrivals:
            self._run_until(arrival.at_s)
            self._now_s = arrival.at_s
            self._arrive(arrival)
        self._run_until(float("inf"))
        self.record.end_s = self._now_s
        return self.record

    def _run_until(self, time_s: float) -> None:
        while self._steps and self._steps[0][0] <= time_s:
            self._now_s, _, replica = heapq.heappop(self._steps)
            self._end_step(replica)

    def _arrive(self, arrival: Arrival) -> None:
        request, began_s = arrival.request, time.thread_time()
        prefix = PrefixChain(request.prompt_token_ids, block_size=self._block_size, salts=_SALTS)
        choices = self.chooser.choices(request, prefix)
        first = next(choices)
        self.record.decision_s.append(time.thread_time() - began_s)
        replica = self._place(request, chain([first], choices))
        if replica is None:
            self.record.num_refused += 1
            return
        replica.num_booked += 1
        self.chooser.sent(replica, prefix)
        self._open[request.request_id] = _Open(arrival.at_s, prefix)
        self._begin_step(replica)

    def _place(self, request: GenerateRequest, keys: Iterable[str]) -> Replica | None:
        """The first replica that takes it; None where all are full, or it is too long for any."""
        for key in keys:
            try:
                self.replicas[key].scheduler.add(request)
                return self.replicas[key]
            except QueueFullError:
                continue
            except InvalidRequestError:
                return None
        return None

    def _begin_step(self, replica: Replica) -> None:
        if not replica.is_stepping and replica.scheduler.has_work:
            replica.is_stepping = True
            heapq.heappush(self._steps, (self._now_s + replica.begin(), next(self._order), replica))

    def _end_step(self, replica: Replica) -> None:
        news = replica.end()
        replica.is_stepping = False
        settled = []
        for request_id in news.first:
            opened = self._open[request_id]
            self.record.ttft_s.append(self._now_s - opened.at_s)
            settled.append(opened.chain)
        for request_id in news.ended:
            self.record.e2e_s.append(self._now_s - self._open.pop(request_id).at_s)
        self.chooser.heard(replica, settled)
        self._begin_step(replica)


def report(fleet: Fleet) -> Figures:
    """The figures of a run: hit rate, balance, latencies, and what the router's decisions took."""
    record, replicas = fleet.record, list(fleet.replicas.values())
    num_prompt_tokens = sum(replica.stats.num_prompt_tokens_total for replica in replicas)
    busy_s = [replica.busy_s for replica in replicas]
    figures: Figures = {
        "requests": float(len(record.e2e_s)),
        "refused": float(record.num_refused),
        "virtual_s": record.end_s,
        "hit_tokens": float(sum(replica.stats.num_cached_tokens_total for replica in replicas)),
        "hit_rate": sum(replica.stats.num_cached_tokens_total for replica in replicas) / max(num_prompt_tokens, 1),
        "load_imbalance": max(busy_s) * len(busy_s) / max(sum(busy_s), 1e-9),
        "mean_busy": sum(busy_s) / len(busy_s) / max(record.end_s, 1e-9),
        "preemptions": float(sum(replica.stats.num_preemptions_total for replica in replicas)),
    }
    for name, values, scale in (
        ("ttft_{}_ms", record.ttft_s, 1e3),
        ("e2e_{}_ms", record.e2e_s, 1e3),
        ("decision_{}_us", record.decision_s, 1e6),
    ):
        figures |= {name.format(f"p{share}"): scale * percentile(values, share / 100) for share in (50, 90, 99)}
    return figures


def reachable(arrivals: Iterable[Arrival], block_size: int) -> float:
    """Hit tokens of one replica that forgets nothing and is told of every prompt in order."""
    seen: set[int] = set()
    total = 0
    for _, request in arrivals:
        chain = list(PrefixChain(request.prompt_token_ids, block_size=block_size, salts=_SALTS))
        total += block_size * next((depth for depth, key in enumerate(chain) if key not in seen), len(chain))
        said = tuple(answer(int(request.request_id[1:]), index) for index in range(request.sampling.max_tokens or 0))
        seen.update(PrefixChain((*request.prompt_token_ids, *said), block_size=block_size, salts=_SALTS))
    return float(total)
