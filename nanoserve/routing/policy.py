"""Which replica takes a request: a pure function of what the feeds last told.

The cost of a replica is counted in tokens: those of the prompt that it must compute, those that wait there already, and
a flat price for each request it runs (weights found with ``benchmarks.routing``). So prefixes attract, and queues
repel. Affinity is bounded, as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016): a
replica with clearly more requests than the mean is taken last, whatever it holds, so that one hot prefix spreads.
Without any prefix this is least load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self
from zlib import crc32

from nanoserve.core.outputs import StepStats

COMPUTED_WEIGHT = 4
"""A prompt token to compute against one that waits: waiting delays this request alone, computing takes from all."""

REQUEST_TOKENS = 96
"""What one more running request costs a replica's others, in waiting tokens."""

LOAD_BOUND = 1.25
LOAD_SLACK = 8
"""A replica is overloaded beyond ``LOAD_BOUND`` times the mean number of requests and ``LOAD_SLACK`` more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One replica's load as a door sees it.

    ``num_running``, ``num_waiting`` and ``num_waiting_tokens`` come from the engine and count every door's requests;
    ``num_booked`` counts this door's own open requests there, so it already knows of those the engine has not reported.
    """

    key: str
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_booked: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0

    @classmethod
    def of(cls, key: str, stats: StepStats, *, num_booked: int) -> Self:
        """The load that an engine's last report and this door's bookings say."""
        return cls(
            key=key,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_waiting_tokens=stats.num_waiting_tokens,
            num_booked=num_booked,
            num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks,
        )

    @property
    def num_requests(self) -> int:
        return max(self.num_booked, self.num_running + self.num_waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request asks of a replica.

    ``hit_tokens``: leading prompt tokens that a replica holds, by its key. ``session_id``: requests that share one
    prefer one replica, whatever it holds: ``home``, or one that is drawn from those ranked. ``tie``: equal replicas are
    told apart by it, the same way at every door.
    """

    num_tokens: int
    tie: str
    session_id: str = ""
    home: str | None = None
    hit_tokens: Mapping[str, int]


def load_limit(num_requests: int, num_replicas: int) -> float:
    """Requests beyond which a replica is overloaded, where all together have ``num_requests``."""
    return LOAD_BOUND * (1 + num_requests) / max(num_replicas, 1) + LOAD_SLACK


def rank(loads: Sequence[EngineLoad], demand: Demand, limit: float | None = None) -> list[EngineLoad]:
    """``loads`` in order of preference for the request. ``limit``: see ``load_limit``; None: these are all of them."""
    if not loads:
        return []
    if limit is None:
        limit = load_limit(sum(load.num_requests for load in loads), len(loads))
    home = demand.home
    if home is None and demand.session_id:
        home = max(loads, key=lambda load: mark(demand.session_id, load.key)).key

    def cost(load: EngineLoad) -> tuple[bool, float, float, int]:
        num_hits = demand.num_tokens if load.key == home else demand.hit_tokens.get(load.key, 0)
        tokens = COMPUTED_WEIGHT * (demand.num_tokens - num_hits)
        tokens += load.num_waiting_tokens + REQUEST_TOKENS * load.num_requests
        return load.num_requests + 1 > limit, tokens, _fullness(load), mark(demand.tie, load.key)

    return sorted(loads, key=cost)


def _fullness(load: EngineLoad) -> float:
    """How full the KV pool is, in tenths: cached blocks are free, so this counts what running requests hold."""
    return round(1 - load.num_free_blocks / load.num_blocks, 1) if load.num_blocks else 0.0


def mark(word: str, key: str) -> int:
    """Rendezvous hashing: doors that know nothing of each other agree, and a replica that leaves moves only its own."""
    mixed = crc32(word.encode()) * 0x9E3779B97F4A7C15 + crc32(key.encode()) * 0xC2B2AE3D27D4EB4F
    mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return mixed >> 32
