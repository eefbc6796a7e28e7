"""Prometheus text for the whole application in one scrape of any router.

Engines report counts over the feed, so every router can show all of them (label ``replica``). What only a door sees
(latencies, open requests) carries the label ``router``; ``render`` merges the families of all routers.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from nanoserve.core.outputs import FinishReason, StepStats
from nanoserve.serving.feed import Peer
from nanoserve.serving.step_totals import COUNTS, SECONDS, WAITS_S

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("requests_running", "Requests in the engine's batch", "num_running"),
    ("requests_waiting", "Requests waiting for the engine", "num_waiting"),
    ("waiting_prompt_tokens", "Prompt tokens of waiting requests", "num_waiting_tokens"),
    ("kv_blocks", "KV blocks in the pool", "num_blocks"),
    ("kv_blocks_free", "KV blocks that no request holds", "num_free_blocks"),
    ("kv_blocks_cached", "Free KV blocks that still hold a reusable prefix", "num_cached_blocks"),
    ("kv_host_blocks", "KV blocks that the host tier can keep", "num_host_blocks"),
    ("kv_host_blocks_cached", "KV blocks that the host tier keeps", "num_host_blocks_cached"),
    ("kv_disk_blocks", "KV blocks that the disk tier can keep", "num_disk_blocks"),
    ("kv_disk_blocks_cached", "KV blocks that the disk tier keeps", "num_disk_blocks_cached"),
)
_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("prompt_tokens", "Prompt tokens computed or reused", "num_prompt_tokens_total"),
    ("cached_tokens", "Prompt tokens whose KV was reused", "num_cached_tokens_total"),
    ("generation_tokens", "Tokens generated", "num_generated_tokens_total"),
    ("draft_tokens", "Guessed tokens that were verified", "num_draft_tokens_total"),
    ("accepted_draft_tokens", "Guessed tokens that were right", "num_accepted_tokens_total"),
    ("kv_blocks_kept", "Evicted KV blocks that went down to the host tier", "num_kept_blocks_total"),
    ("kv_blocks_brought_up", "KV blocks that came up from the host tier", "num_brought_up_blocks_total"),
    ("kv_blocks_fetched", "KV blocks that came from the disk tier to the host tier", "num_fetched_blocks_total"),
    ("kv_blocks_lost", "KV blocks that the disk tier failed to write or read", "num_lost_blocks_total"),
    ("preemptions", "Requests whose KV was taken back", "num_preemptions_total"),
    ("requests_finished", "Requests that the engine finished", "num_finished_total"),
    ("requests_aborted", "Requests that were aborted in the engine", "num_aborted_total"),
)
_DOOR_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the request's arrival at the door to its first token", WAITS_S),
    "inter_token_latency_seconds": ("Between outputs", SECONDS),
    "time_per_output_token_seconds": ("Mean time a token after the first, of an answer", SECONDS),
    "request_seconds": ("From arrival to the end", WAITS_S),
}
_STEP_HISTOGRAMS = {
    "step_seconds": ("A step of the engine", SECONDS),
    "step_requests": ("Requests in the batch of a step", COUNTS),
    "step_tokens": ("Tokens computed by a step", COUNTS),
    "queue_seconds": ("From the request's arrival at the door to its first place in a batch", WAITS_S),
}
_PHASES = ("schedule", "execute", "update")


class Metrics:
    """What this router counts for one model; it observes the door (``feed.Observer``)."""

    def __init__(self, router_id: str, model: str) -> None:
        self._router_id = router_id
        self._model = model
        own = ("model", "router")
        self._open = Gauge("nanoserve_door_requests_open", "Requests open at the door", own, registry=None)
        self._ended = Counter(
            "nanoserve_door_requests", "Requests that ended at the door", (*own, "reason"), registry=None
        )
        self._resubmitted = Counter("nanoserve_door_resubmits", "Requests moved to another engine", own, registry=None)
        self._door_histograms = {
            name: Histogram(f"nanoserve_{name}", text, own, registry=None, buckets=buckets)
            for name, (text, buckets) in _DOOR_HISTOGRAMS.items()
        }
        observe = {name: known.labels(model, router_id).observe for name, known in self._door_histograms.items()}
        self.first_token = observe["time_to_first_token_seconds"]
        self.next_tokens = observe["inter_token_latency_seconds"]
        self.paced = observe["time_per_output_token_seconds"]
        self._observe_end = observe["request_seconds"]
        # Shown as 0 from the start: a rate does not see the step from nothing to one.
        self._count_resubmit = self._resubmitted.labels(model, router_id).inc
        self._count_end = {
            reason.value: self._ended.labels(model, router_id, reason.value).inc for reason in FinishReason
        }

    def step(self, peer_id: str, stats: StepStats) -> None:
        """Engines count their steps themselves (``step_totals``)."""

    def finished(self, reason: str, seconds: float) -> None:
        self._count_end[reason]()
        self._observe_end(seconds)

    def resubmitted(self) -> None:
        self._count_resubmit()

    def door_families(self, num_open: int) -> list[Metric]:
        """What only this door knows; picklable, so that another router can show it."""
        self._open.labels(self._model, self._router_id).set(num_open)
        own = (self._open, self._ended, self._resubmitted, *self._door_histograms.values())
        return [family for metric in own for family in metric.collect()]

    def engine_families(self, peers: Sequence[Peer]) -> Iterator[Metric]:
        """What the engines last reported to this door."""
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, attribute in table:
                family = kind(f"nanoserve_{name}", text, labels=("model", "replica"))
                for peer in peers:
                    family.add_metric((self._model, peer.peer_id), getattr(peer.stats, attribute))
                yield family
        yield from self._step_families(peers)

    def _step_families(self, peers: Sequence[Peer]) -> Iterator[Metric]:
        known = [(peer.peer_id, peer.totals) for peer in peers if peer.totals is not None]
        for name, (text, bounds) in _STEP_HISTOGRAMS.items():
            family = HistogramMetricFamily(f"nanoserve_{name}", text, labels=("model", "replica"))
            for peer_id, totals in known:
                spread = getattr(totals, name)
                edges = [*map(float, bounds), float("inf")]
                buckets = [(str(edge), n) for edge, n in zip(edges, accumulate(spread.counts), strict=True)]
                buckets[-1] = ("+Inf", buckets[-1][1])
                family.add_metric((self._model, peer_id), buckets, spread.total)
            yield family
        text = "Time of steps by what it went into"
        phases = CounterMetricFamily("nanoserve_step_phase_seconds", text, labels=("model", "replica", "phase"))
        for peer_id, totals in known:
            for phase in _PHASES:
                phases.add_metric((self._model, peer_id, phase), getattr(totals, f"{phase}_s"))
        yield phases


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
