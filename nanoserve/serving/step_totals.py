"""What an engine's steps amount to, counted where they happen: every router shows the same figures, each step once."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from nanoserve.core.outputs import StepStats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Spread(NamedTuple):
    """How often a value fell up to each of some bounds (and not below the one before), the last time beyond all."""

    counts: tuple[int, ...]
    total: float


class StepTotals(NamedTuple):
    """Since the engine's start. ``queue_seconds`` counts requests, the others steps; phases are sums of seconds."""

    step_seconds: Spread
    step_requests: Spread
    step_tokens: Spread
    queue_seconds: Spread
    schedule_s: float
    execute_s: float
    update_s: float


class _Tally:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def spread(self) -> Spread:
        return Spread(tuple(self._counts), self._total)


class StepMeter:
    """Counts one engine's steps."""

    def __init__(self) -> None:
        self._last_step_id = 0
        self._seconds, self._requests, self._tokens = _Tally(SECONDS), _Tally(COUNTS), _Tally(COUNTS)
        self._queue = _Tally(WAITS_S)
        self._schedule_s = self._execute_s = self._update_s = 0.0

    def add(self, stats: StepStats) -> None:
        """What a step reported; a report without a new step is ignored."""
        if stats.step_id == self._last_step_id:
            return
        self._last_step_id = stats.step_id
        self._seconds.add(stats.schedule_s + stats.execute_s + stats.update_s)
        self._requests.add(stats.num_running)
        self._tokens.add(stats.num_scheduled_tokens)
        for seconds in stats.queue_times_s:
            self._queue.add(seconds)
        self._schedule_s += stats.schedule_s
        self._execute_s += stats.execute_s
        self._update_s += stats.update_s

    def totals(self) -> StepTotals:
        return StepTotals(
            self._seconds.spread(),
            self._requests.spread(),
            self._tokens.spread(),
            self._queue.spread(),
            self._schedule_s,
            self._execute_s,
            self._update_s,
        )
