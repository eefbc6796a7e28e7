"""What happened to the last requests, and why: a bounded store of events, one record an HTTP request.

Events come from three places: the HTTP side (received), the door (sent, refused, first token, moved, finished), and the
engines, whose events (admitted, chunk, preempted, each with the engine's own time) ride the feed with their step.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanoserve.core.request import GenerateRequest

Json = dict[str, Any]
MAX_RECORDS = 2000
MAX_EVENTS = 256


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one choice of a request. ``at_s``: Unix time."""

    kind: str
    at_s: float
    choice: int
    details: Json


@dataclass(slots=True, kw_only=True)
class Record:
    """One HTTP request: ``id`` is that of its response, ``request_id`` its ``x-request-id``. ``context``: a trace's."""

    id: str
    request_id: str
    tenant: str
    model: str
    num_open: int = 0
    num_dropped: int = 0
    events: list[Event] = field(default_factory=list)
    context: object = None

    def to_json(self) -> Json:
        began_s = self.events[0].at_s
        events = [_event(event, began_s) for event in sorted(self.events, key=lambda event: event.at_s)]
        about = {"object": "request.timeline", "id": self.id, "request_id": self.request_id, "model": self.model}
        return about | {"finished": not self.num_open, "events": events, "events_dropped": self.num_dropped}


class Exporter(Protocol):
    """Who wants to know how a choice went, once it has ended."""

    def choice_ended(self, record: Record, choice: int) -> None: ...


class Timelines:
    """Owns the records of one router, the newest ``MAX_RECORDS``."""

    def __init__(self, exporter: Exporter | None = None, max_records: int = MAX_RECORDS) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._by_request_id: dict[tuple[str, str], Record] = {}
        self._exporter = exporter
        self._max_records = max_records

    def received(self, request: GenerateRequest, model: str, http_id: str, context: object = None) -> None:
        """A choice is about to be sent to an engine."""
        id_, _ = _split(request.request_id)
        if (record := self._records.get(id_)) is None:
            record = Record(id=id_, request_id=http_id, tenant=request.tenant, model=model, context=context)
            self._records[id_] = self._by_request_id[request.tenant, http_id] = record
            self._forget_oldest()
        record.num_open += 1
        self.note(
            request.request_id,
            "received",
            at_s=request.arrival_s or None,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            priority=request.priority,
            deadline=request.deadline_s,
        )

    def note(self, request_id: str, event: str, *, at_s: float | None = None, **details: Any) -> None:
        """An event of a choice; of one whose record is gone it is ignored."""
        id_, choice = _split(request_id)
        if (record := self._records.get(id_)) is None:
            return
        if len(record.events) < MAX_EVENTS or event in ("finished", "refused"):
            record.events.append(Event(event, time.time() if at_s is None else at_s, choice, details))
        else:
            record.num_dropped += 1
        if event in ("finished", "refused"):
            record.num_open -= 1
            if self._exporter is not None:
                self._exporter.choice_ended(record, choice)

    def find(self, tenant: str, id_: str) -> Json | None:
        """The record by the response's id or the ``x-request-id``, if it is this tenant's."""
        record = self._records.get(id_) or self._by_request_id.get((tenant, id_))
        return None if record is None or record.tenant != tenant else record.to_json()

    def _forget_oldest(self) -> None:
        while len(self._records) > self._max_records:
            _, old = self._records.popitem(last=False)
            if self._by_request_id.get((old.tenant, old.request_id)) is old:
                del self._by_request_id[old.tenant, old.request_id]


def _event(event: Event, began_s: float) -> Json:
    after_ms = round(1e3 * (event.at_s - began_s), 3)
    return {"event": event.kind, "at": event.at_s, "after_ms": after_ms, "choice": event.choice} | event.details


def _split(request_id: str) -> tuple[str, int]:
    """The response's id and the choice's number in it."""
    id_, _, index = request_id.rpartition("-")
    return (id_, int(index)) if id_ and index.isdecimal() else (request_id, 0)
