"""How many engines: from what the engines themselves report, never from Serve's count of ongoing requests.

Every door keeps one feed open to every engine, and Serve counts each as an ongoing request: its default policy would
see load where there is none, and with several doors it would scale up for ever. Serve pickles this module by value:
keep it free of imports from the package and of state.
"""

import math
from typing import Any


class ByLoad:
    """A Serve policy: one engine for each ``requests_per_replica`` running or waiting requests."""

    def __init__(self, requests_per_replica: float) -> None:
        self._requests_per_replica = requests_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        reports = context.aggregated_metrics or {}
        load = sum(sum(reports.get(name, {}).values()) for name in ("running", "waiting"))
        wanted = math.ceil(load / self._requests_per_replica)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, wanted)), {}
