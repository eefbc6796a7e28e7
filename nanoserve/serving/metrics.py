"""Prometheus text for the whole application in one scrape of any router.

Engines report counts over the feed, so every router can show all of them (label ``replica``). What only a door sees
(latencies, open requests) carries the label ``router``; ``scrape`` merges the families of all routers.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from nanoserve.core.outputs import StepStats
from nanoserve.serving.feed import Peer

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("requests_running", "Requests in the engine's batch", "num_running"),
    ("requests_waiting", "Requests waiting for the engine", "num_waiting"),
    ("waiting_prompt_tokens", "Prompt tokens of waiting requests", "num_waiting_tokens"),
    ("kv_blocks", "KV blocks in the pool", "num_blocks"),
    ("kv_blocks_free", "KV blocks that no request holds", "num_free_blocks"),
    ("kv_blocks_cached", "Free KV blocks that still hold a reusable prefix", "num_cached_blocks"),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("prompt_tokens", "Prompt tokens computed or reused", "num_prompt_tokens_total"),
    ("cached_tokens", "Prompt tokens whose KV was reused", "num_cached_tokens_total"),
    ("generation_tokens", "Tokens generated", "num_generated_tokens_total"),
    ("draft_tokens", "Guessed tokens that were verified", "num_draft_tokens_total"),
    ("accepted_draft_tokens", "Guessed tokens that were right", "num_accepted_tokens_total"),
    ("preemptions", "Requests whose KV was taken back", "num_preemptions_total"),
    ("requests_finished", "Requests that the engine finished", "num_finished_total"),
    ("requests_aborted", "Requests that were aborted in the engine", "num_aborted_total"),
)


class Metrics:
    """What this router counts; it observes the door (``feed.Observer``)."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._open = Gauge("nanoserve_door_requests_open", "Requests open at the door", ["router"], registry=None)
        self._ended = Counter(
            "nanoserve_door_requests", "Requests that ended at the door", ["router", "reason"], registry=None
        )
        self._resubmitted = Counter(
            "nanoserve_door_resubmits", "Requests moved to another engine", ["router"], registry=None
        )
        self._ttft = Histogram(
            "nanoserve_time_to_first_token_seconds",
            "From the request's arrival at the door to its first token",
            ["router"],
            registry=None,
            buckets=_LATENCY_S,
        )
        self._itl = Histogram(
            "nanoserve_inter_token_latency_seconds", "Between outputs", ["router"], registry=None, buckets=_GAP_S
        )
        self._e2e = Histogram(
            "nanoserve_request_seconds", "From arrival to the end", ["router"], registry=None, buckets=_LATENCY_S
        )
        self._step = Histogram(
            "nanoserve_step_seconds", "A step of the engine", ["replica"], registry=None, buckets=_GAP_S
        )
        self._observe_ttft = self._ttft.labels(router_id).observe
        self._observe_itl = self._itl.labels(router_id).observe

    def step(self, peer_id: str, stats: StepStats) -> None:
        self._step.labels(peer_id).observe(stats.schedule_s + stats.execute_s + stats.update_s)

    def first_token(self, seconds: float) -> None:
        self._observe_ttft(seconds)

    def next_tokens(self, seconds: float) -> None:
        self._observe_itl(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        self._ended.labels(self._router_id, reason).inc()
        self._e2e.labels(self._router_id).observe(seconds)

    def resubmitted(self) -> None:
        self._resubmitted.labels(self._router_id).inc()

    def door_families(self, num_open: int) -> list[Metric]:
        """What only this door knows; picklable, so that another router can show it."""
        self._open.labels(self._router_id).set(num_open)
        own = (self._open, self._ended, self._resubmitted, self._ttft, self._itl, self._e2e)
        return [family for metric in own for family in metric.collect()]

    def engine_families(self, peers: Sequence[Peer]) -> Iterator[Metric]:
        """What the engines last reported to this door."""
        for name, text, attribute in _GAUGES:
            gauge = GaugeMetricFamily(f"nanoserve_{name}", text, labels=("replica",))
            for peer in peers:
                gauge.add_metric((peer.peer_id,), getattr(peer.stats, attribute))
            yield gauge
        for name, text, attribute in _COUNTERS:
            counter = CounterMetricFamily(f"nanoserve_{name}", text, labels=("replica",))
            for peer in peers:
                counter.add_metric((peer.peer_id,), getattr(peer.stats, attribute))
            yield counter
        yield from self._step.collect()


def render(families: Iterable[Metric]) -> bytes:
    """Prometheus text; families of one name, from several routers, become one."""
    merged: dict[str, Metric] = {}
    for family in families:
        known = merged.setdefault(family.name, family)
        if known is not family:
            known.samples.extend(family.samples)

    class _Merged:
        def collect(self) -> Iterable[Metric]:
            return merged.values()

    registry = CollectorRegistry()
    registry.register(_Merged())
    text: bytes = generate_latest(registry)
    return text
