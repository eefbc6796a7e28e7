"""How many engines: from what the engines themselves report, never from Serve's count of ongoing requests.

Every door keeps one feed open to every engine, and Serve counts each as an ongoing request: its default policy would
see load where there is none, and with several doors it would scale up for ever.
"""

import math
from collections.abc import Callable
from typing import Any


def by_load(requests_per_replica: float) -> Callable[[Any], tuple[int, dict[str, Any]]]:
    """A Serve policy: one engine for each ``requests_per_replica`` running or waiting requests."""

    def policy(context: Any) -> tuple[int, dict[str, Any]]:
        reports = context.aggregated_metrics or {}
        load = sum(sum(reports.get(name, {}).values()) for name in ("running", "waiting"))
        wanted = math.ceil(load / requests_per_replica)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, wanted)), {}

    return policy
