"""What each tenant uses at this router, as metrics; tenants beyond the first 64 share the label ``other``."""

from collections.abc import Iterable

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

MAX_TENANTS = 64
_TTFT_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LABELS = ("tenant", "model", "router")
_REASONS = frozenset({"quota", "queue_full", "context_length_exceeded", "service_unavailable_error"})


class Usage:
    """Counts by tenant. Whoever asks without a key is ``anybody``."""

    def __init__(self, router_id: str = "") -> None:
        self._router_id = router_id
        self._names: dict[str, str] = {"": "anybody"}
        self._open = Gauge("nanoserve_tenant_requests_open", "A tenant's open requests", _LABELS, registry=None)
        self._opened = Counter("nanoserve_tenant_requests", "A tenant's accepted requests", _LABELS, registry=None)
        self._prompt = Counter("nanoserve_tenant_prompt_tokens", "A tenant's prompt tokens", _LABELS, registry=None)
        self._generated = Counter(
            "nanoserve_tenant_generation_tokens", "Tokens generated for a tenant", _LABELS, registry=None
        )
        self._refused = Counter(
            "nanoserve_tenant_refused", "A tenant's refused requests", ("tenant", "router", "reason"), registry=None
        )
        self._ttft = Histogram(
            "nanoserve_tenant_time_to_first_token_seconds",
            "From acceptance to the first token",
            _LABELS,
            registry=None,
            buckets=_TTFT_S,
        )

    def opened(self, tenant: str, model: str, num_prompt_tokens: int) -> None:
        labels = self._name(tenant), model, self._router_id
        self._open.labels(*labels).inc()
        self._opened.labels(*labels).inc()
        self._prompt.labels(*labels).inc(num_prompt_tokens)

    def closed(self, tenant: str, model: str) -> None:
        self._open.labels(self._name(tenant), model, self._router_id).dec()

    def generated(self, tenant: str, model: str, num_tokens: int, ttft_s: float | None) -> None:
        """``ttft_s`` comes with the first tokens of a request."""
        labels = self._name(tenant), model, self._router_id
        self._generated.labels(*labels).inc(num_tokens)
        if ttft_s is not None:
            self._ttft.labels(*labels).observe(ttft_s)

    def refused(self, tenant: str, reason: str) -> None:
        known = reason if reason in _REASONS else "other"
        self._refused.labels(self._name(tenant), self._router_id, known).inc()

    def families(self) -> Iterable[Metric]:
        """Picklable, so that another router can show them."""
        metrics = (self._open, self._opened, self._prompt, self._generated, self._refused, self._ttft)
        return [family for metric in metrics for family in metric.collect()]

    def _name(self, tenant: str) -> str:
        if tenant not in self._names and len(self._names) <= MAX_TENANTS:
            self._names[tenant] = tenant
        return self._names.get(tenant, "other")
