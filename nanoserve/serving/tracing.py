"""OpenTelemetry traces from the door to the engine's steps, made from timelines: engines know nothing of them.

A span for the HTTP request (a child of the W3C ``traceparent`` that came with it), in it one a choice, and in that the
time in the queue, of the prompt (its chunks, with their steps, as events) and of the answer. Spans of a choice are made
when it has ended, with the times of its timeline. Without an endpoint none of this is imported.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.core.errors import ConfigError
from nanoserve.serving.timeline import Event, Record

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_PHASES = {"sent": "queue", "preempted": "queue", "admitted": "prefill", "first_token": "decode"}
_ENDS = frozenset({"moved", "finished", "refused"})


def check_exporter() -> None:
    """
    Raises:
        ConfigError: the package that sends spans is not installed.
    """
    try:
        found = find_spec(f"{_EXPORTER}.trace_exporter")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError("`otlp_endpoint` needs the package opentelemetry-exporter-otlp-proto-http: nanoserve[otel].")


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to a collector over HTTP; ``endpoint`` is its address without ``/v1/traces``."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")


class Tracing:
    """Owns the tracer of one router; Ray's own traces have another."""

    def __init__(self, exporter: SpanExporter, router_id: str) -> None:
        resource = Resource.create({"service.name": "nanoserve", "service.instance.id": router_id})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=True)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("nanoserve")

    def wrap(self, app: ASGIApp) -> "Traces":
        return Traces(app, self)

    def flush(self) -> None:
        """Send what there is."""
        self._provider.force_flush()

    def close(self) -> None:
        self._provider.shutdown()

    def choice_ended(self, record: Record, choice: int) -> None:
        events = sorted((e for e in record.events if e.choice == choice), key=lambda event: event.at_s)
        if not isinstance(record.context, Context) or not events:
            return
        span = self.tracer.start_span(
            "generate", record.context, attributes=_attributes(record, events), start_time=_ns(events[0].at_s)
        )
        for event in events:
            if event.kind in ("moved", "preempted", "passed_on"):
                span.add_event(event.kind, _fine(event.details), _ns(event.at_s))
        self._phases(events, set_span_in_context(span, record.context))
        if events[-1].details.get("reason") == "error" or events[-1].kind == "refused":
            span.set_status(Status(StatusCode.ERROR, str(events[-1].details.get("reason"))))
        span.end(_ns(events[-1].at_s))

    def _phases(self, events: list[Event], context: Context) -> None:
        borders = [event for event in events if event.kind in _PHASES or event.kind in _ENDS]
        for first, last in pairwise(borders):
            if (name := _PHASES.get(first.kind)) is None:
                continue
            span = self.tracer.start_span(name, context, attributes=_fine(first.details), start_time=_ns(first.at_s))
            for chunk in _chunks(events, first, last):
                span.add_event("chunk", _fine(chunk.details), _ns(chunk.at_s))
            span.end(_ns(last.at_s))


def _chunks(events: list[Event], first: Event, last: Event) -> Iterator[Event]:
    return (event for event in events if event.kind == "chunk" and first.at_s <= event.at_s < last.at_s)


def _attributes(record: Record, events: list[Event]) -> dict[str, Any]:
    """The names of OpenTelemetry's conventions for generative AI where there are any."""
    received, last = events[0].details, events[-1].details
    cached = next((event.details["cached_tokens"] for event in events if event.kind == "admitted"), None)
    return _fine(
        {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.model": record.model,
            "gen_ai.response.id": record.id,
            "gen_ai.usage.input_tokens": received.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": last.get("tokens"),
            "nanoserve.request_id": record.request_id,
            "nanoserve.tenant": record.tenant,
            "nanoserve.choice": events[0].choice,
            "nanoserve.cached_tokens": cached,
            "nanoserve.finish_reason": last.get("reason"),
        }
    )


def _fine(details: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in details.items() if value is not None}


def _ns(seconds: float) -> int:
    return int(1e9 * seconds)


class Traces:
    """Opens a span for each POST; ``scope["trace"]`` is the context for what happens inside."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"] if k in _TRACE_HEADERS}
        parent = self._propagator.extract(headers)
        span = self._tracing.tracer.start_span("POST", parent, kind=SpanKind.SERVER)
        scope["trace"] = set_span_in_context(span, parent)

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            if (route := scope.get("route")) is not None:
                span.update_name(f"POST {route.path}")
            span.set_attribute("nanoserve.request_id", scope["request_id"])
            span.end()
