"""Prometheus text for the whole application in one scrape of any router.

Engines report counts over the feed, so every router can show all of them (label ``replica``). What only a door sees
(latencies, open requests) carries the label ``router``; ``render`` merges the families of all routers. Every door sees
every step, so a histogram of steps is there once a router: quantiles and means over it are right, sums are not.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from nanoserve.core.outputs import FinishReason, StepStats
from nanoserve.serving.feed import Peer

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_COUNT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

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
    "time_to_first_token_seconds": ("From the request's arrival at the door to its first token", _LATENCY_S),
    "inter_token_latency_seconds": ("Between outputs", _GAP_S),
    "time_per_output_token_seconds": ("Mean time a token after the first, of an answer", _GAP_S),
    "request_seconds": ("From arrival to the end", _LATENCY_S),
}
_STEP_HISTOGRAMS = {
    "step_seconds": ("A step of the engine", _GAP_S),
    "step_requests": ("Requests in the batch of a step", _COUNT),
    "step_tokens": ("Tokens computed by a step", _COUNT),
    "queue_seconds": ("From the request's arrival at the door to its first place in a batch", _LATENCY_S),
}
_PHASES = ("schedule", "execute", "update")


class Metrics:
    """What this router counts for one model; it observes the door (``feed.Observer``)."""

    def __init__(self, router_id: str, model: str) -> None:
        self._router_id = router_id
        self._model = model
        own, step = ("model", "router"), ("model", "router", "replica")
        self._open = Gauge("nanoserve_door_requests_open", "Requests open at the door", own, registry=None)
        self._ended = Counter(
            "nanoserve_door_requests", "Requests that ended at the door", (*own, "reason"), registry=None
        )
        self._resubmitted = Counter("nanoserve_door_resubmits", "Requests moved to another engine", own, registry=None)
        self._phases = Counter(
            "nanoserve_step_phase_seconds", "Time of steps by what it went into", (*step, "phase"), registry=None
        )
        self._door_histograms = {
            name: Histogram(f"nanoserve_{name}", text, own, registry=None, buckets=buckets)
            for name, (text, buckets) in _DOOR_HISTOGRAMS.items()
        }
        self._step_histograms = {
            name: Histogram(f"nanoserve_{name}", text, step, registry=None, buckets=buckets)
            for name, (text, buckets) in _STEP_HISTOGRAMS.items()
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
        self._of_replica: dict[str, _StepMetrics] = {}

    def step(self, peer_id: str, stats: StepStats) -> None:
        if (known := self._of_replica.get(peer_id)) is None:
            labels = (self._model, self._router_id, peer_id)
            known = self._of_replica[peer_id] = _StepMetrics(self._step_histograms, self._phases, labels)
        known.add(stats)

    def finished(self, reason: str, seconds: float) -> None:
        self._count_end[reason]()
        self._observe_end(seconds)

    def resubmitted(self) -> None:
        self._count_resubmit()

    def door_families(self, num_open: int) -> list[Metric]:
        """What only this door knows; picklable, so that another router can show it."""
        self._open.labels(self._model, self._router_id).set(num_open)
        counters = (self._open, self._ended, self._resubmitted, self._phases)
        own = (*counters, *self._door_histograms.values(), *self._step_histograms.values())
        return [family for metric in own for family in metric.collect()]

    def engine_families(self, peers: Sequence[Peer]) -> Iterator[Metric]:
        """What the engines last reported to this door; those that are gone are forgotten."""
        for peer_id in self._of_replica.keys() - {peer.peer_id for peer in peers}:
            self._forget(peer_id)
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, attribute in table:
                family = kind(f"nanoserve_{name}", text, labels=("model", "replica"))
                for peer in peers:
                    family.add_metric((self._model, peer.peer_id), getattr(peer.stats, attribute))
                yield family

    def _forget(self, peer_id: str) -> None:
        labels = (self._model, self._router_id, peer_id)
        del self._of_replica[peer_id]
        for histogram in self._step_histograms.values():
            histogram.remove(*labels)
        for phase in _PHASES:
            self._phases.remove(*labels, phase)


class _StepMetrics:
    """One replica's steps as this door sees them; the children are looked up once."""

    def __init__(self, histograms: dict[str, Histogram], phases: Counter, labels: tuple[str, str, str]) -> None:
        observe = {name: histogram.labels(*labels).observe for name, histogram in histograms.items()}
        self._seconds, self._requests = observe["step_seconds"], observe["step_requests"]
        self._tokens, self._queue = observe["step_tokens"], observe["queue_seconds"]
        self._schedule, self._execute, self._update = (phases.labels(*labels, phase).inc for phase in _PHASES)

    def add(self, stats: StepStats) -> None:
        self._seconds(stats.schedule_s + stats.execute_s + stats.update_s)
        self._requests(stats.num_running)
        self._tokens(stats.num_scheduled_tokens)
        self._schedule(stats.schedule_s)
        self._execute(stats.execute_s)
        self._update(stats.update_s)
        for seconds in stats.queue_times_s:
            self._queue(seconds)


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
