"""What happened to a request: its timeline, and the traces made of it."""

import asyncio
from typing import Any

import httpx
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nanoserve.core.errors import QueueFullError
from nanoserve.serving.backstage import Backstage
from nanoserve.serving.door import Health, RequestStream, ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.serving.timeline import MAX_EVENTS, Timelines
from nanoserve.serving.tracing import Tracing
from tests.engine.driving import Driver, make_config, make_request
from tests.serving.conftest import ClientFor
from tests.serving.feed_rig import Rig, read, request, until
from tests.serving.replies import refused
from tests.serving.scripted_door import ScriptedDoor


def kinds(timeline: dict[str, Any] | None) -> list[str]:
    assert timeline is not None
    return [event["event"] for event in timeline["events"]]


# What engines tell


def test_an_engine_tells_of_admission_chunks_and_preemption() -> None:
    driver = Driver(make_config(num_blocks=4, max_num_batched_tokens=8), clock=lambda: 5.0)
    events = []
    driver.add(make_request("old", 7, max_tokens=8))
    driver.add(make_request("young", [1] * 7, max_tokens=8))
    while driver.core.has_work:
        events += [(event.request_id, event.kind, event.num_tokens) for event in driver.step().stats.events]
    mine = [(kind, num_tokens) for request_id, kind, num_tokens in events if request_id == "young"]
    assert mine[:3] == [("admitted", 0), ("chunk", 1), ("chunk", 6)]
    assert ("preempted", 7) in mine
    assert [kind for kind, _ in mine].count("admitted") == 2


# What a door remembers


async def test_a_request_that_loses_its_engine_says_where_it_went_and_why() -> None:
    timelines = Timelines()
    rig = Rig(journal=timelines)
    await rig.join("a", "b")
    asked = request("chat-0", 60)
    timelines.received(asked, "m", "http-1")
    stream = await rig.door.open(asked)
    assert stream.peer is not None
    first = stream.peer.peer_id
    await until(lambda: len(stream.emitted) > 3)
    rig.transport.kill(first)
    await read(stream)
    found = timelines.find("", "http-1")
    assert found is not None
    assert found == timelines.find("", "chat")
    seen = kinds(found)
    assert seen[:5] == ["received", "sent", "admitted", "chunk", "first_token"]
    assert seen[5:] == ["moved", "sent", "admitted", "chunk", "finished"]
    by_kind = {event["event"]: event for event in found["events"]}
    assert by_kind["moved"]["replica"] == first
    assert by_kind["moved"]["reason"]
    assert by_kind["sent"]["replica"] != first
    assert (by_kind["finished"]["reason"], by_kind["finished"]["tokens"]) == ("length", 60)
    assert found["finished"]
    assert [event["after_ms"] for event in found["events"]] == sorted(event["after_ms"] for event in found["events"])
    await rig.close()


def test_the_store_is_bounded() -> None:
    timelines = Timelines(max_records=10)
    for number in range(50):
        timelines.received(make_request(f"r{number}-0", 3), "m", f"h{number}")
    assert len(timelines._records) == len(timelines._by_request_id) == 10
    for _ in range(3 * MAX_EVENTS):
        timelines.note("r49-0", "chunk", tokens=1)
    timelines.note("r49-0", "finished", reason="stop", tokens=1)
    found = timelines.find("", "r49")
    assert found is not None
    assert (kinds(found)[-1], found["finished"]) == ("finished", True)
    assert len(found["events"]) == MAX_EVENTS + 1
    assert found["events_dropped"] == 2 * MAX_EVENTS + 1
    timelines.note("r0-0", "finished")
    assert timelines.find("", "r0") is None


# Over HTTP


BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 3, "n": 2}


async def test_only_its_own_tenant_may_ask(client_for: ClientFor, served: ServedModel) -> None:
    door = ScriptedDoor([served], token_ids=[65])
    async with client_for(door, HttpConfig(api_keys=("first", "second"))) as client:
        keys = [{"authorization": f"Bearer {name}"} for name in ("first", "second")]
        named = keys[0] | {"x-request-id": "mine"}
        reply = await client.post("/v1/completions", json=BODY | {"model": served.name}, headers=named)
        path = f"/v1/requests/{reply.json()['id']}/timeline"
        found = (await client.get(path, headers=keys[0])).json()
        assert (found["request_id"], found["model"]) == ("mine", served.name)
        assert [(event["event"], event["choice"]) for event in found["events"]] == [("received", 0), ("received", 1)]
        assert found["events"][0]["prompt_tokens"] == 4
        assert (await client.get("/v1/requests/mine/timeline", headers=keys[0])).json() == found
        for id_ in (found["id"], "mine", "nobody"):
            answer = await client.get(f"/v1/requests/{id_}/timeline", headers=keys[1])
            assert refused(answer, 404)["code"] == "request_not_found"
        refused(await client.get(path), 401)
        door.refusal = QueueFullError("Full.", retry_after_s=2)
        await client.post("/v1/completions", json=BODY | {"model": served.name}, headers=named)
        last = (await client.get("/v1/requests/mine/timeline", headers=keys[0])).json()
        assert "refused" in kinds(last)


class FeedHttpDoor:
    """The feed as the app sees it, with one model."""

    def __init__(self, rig: Rig, served: ServedModel) -> None:
        self._rig = rig
        self._served = served

    async def open(self, request: Any, model: str) -> RequestStream:
        return await self._rig.door.open(request)

    def models(self) -> list[ServedModel]:
        return [self._served]

    async def health(self) -> Health:
        return Health(healthy=True, ready=True)

    async def metrics(self) -> bytes:
        return b""


async def test_a_trace_goes_from_the_door_to_the_step(served: ServedModel) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "r1")
    timelines = Timelines(tracing)
    rig = Rig(journal=timelines)
    await rig.join("a")
    backstage = Backstage(timelines=timelines, trace=tracing.wrap)
    app = build_app(FeedHttpDoor(rig, served), HttpConfig(), backstage)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        body = {"model": served.name, "prompt": [5, 6, 7, 8], "max_tokens": 4, "ignore_eos": True}
        reply = await client.post("/v1/completions", json=body, headers=parent)
        assert reply.status_code == 200, reply.text
    await asyncio.to_thread(tracing.flush)
    spans: dict[str, ReadableSpan] = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {"POST /v1/completions", "generate", "queue", "prefill", "decode"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {"0af7651916cd43dd8448eb211c80319c"}
    server, generate = spans["POST /v1/completions"], spans["generate"]
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" == "b7ad6b7169203331"
    assert generate.parent == server.context
    assert all(spans[name].parent == generate.context for name in ("queue", "prefill", "decode"))
    assert generate.attributes is not None
    assert generate.attributes["gen_ai.usage.input_tokens"] == 4
    assert generate.attributes["gen_ai.usage.output_tokens"] == 4
    assert generate.attributes["nanoserve.finish_reason"] == "length"
    (chunk,) = spans["prefill"].events
    assert chunk.attributes is not None
    assert (chunk.name, chunk.attributes["tokens"]) == ("chunk", 4)
    assert chunk.attributes["step"]
    times = [spans[name].start_time for name in ("generate", "queue", "prefill", "decode")]
    assert times == sorted(times, key=lambda time: time or 0)
    assert server.attributes is not None
    assert server.attributes["http.response.status_code"] == 200
    tracing.close()
    await rig.close()


def test_nothing_of_opentelemetry_is_imported_where_there_are_no_traces() -> None:
    import subprocess
    import sys

    code = "import nanoserve.serving.http, nanoserve.serving.feed, sys; print('opentelemetry.sdk.trace' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
