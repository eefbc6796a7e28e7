"""How many engines: from what the engines themselves report, never from Serve's count of ongoing requests.

Every door keeps one feed open to every engine, and Serve counts each as an ongoing request: its default policy would
see load where there is none, and with several doors it would scale up for ever. Serve pickles this module by value:
keep it free of imports from the package and of state.
"""

import math
from typing import Any

MARGIN = 0.7
"""Engines leave only when this share of what the rest can do would carry the load, so that none comes back soon."""


class BySignals:
    """A Serve policy over four signals, of which the most demanding decides.

    Requests open on all engines, against ``requests_per_replica``; prompt tokens that wait, against
    ``queued_tokens_per_replica``; KV blocks in use while requests wait, against nine tenths; and the seconds that
    requests waited lately for their first step, against ``ttft_goal_s``, where one is given. Serve applies the delays.
    """

    def __init__(
        self, requests_per_replica: float, queued_tokens_per_replica: float, ttft_goal_s: float | None = None
    ) -> None:
        self._requests_per_replica = requests_per_replica
        self._queued_tokens_per_replica = queued_tokens_per_replica
        self._ttft_goal_s = ttft_goal_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        reports = context.aggregated_metrics or {}
        now = context.current_num_replicas
        up, down = (math.ceil(self._load(reports, now) / share) for share in (1.0, MARGIN))
        wanted = min(max(now, up), down)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, wanted)), {}

    def _load(self, reports: Any, num_replicas: int) -> float:
        """How many engines the signals call for, as a fraction."""

        def values(name: str) -> list[float]:
            return list(reports.get(name, {}).values())

        waiting = sum(values("waiting"))
        load = max(
            (sum(values("running")) + waiting) / self._requests_per_replica,
            sum(values("waiting_tokens")) / self._queued_tokens_per_replica,
        )
        if waiting:
            load = max(load, sum(values("kv_usage")) / 0.9)
        if waiting and self._ttft_goal_s and max(values("queue_s"), default=0.0) > self._ttft_goal_s:
            load = max(load, num_replicas + 1.0)
        return load
