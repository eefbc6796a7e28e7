"""The real socket between a door and an engine, on this machine's loopback and without Ray."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import InvalidRequestError, QueueFullError
from nanoserve.core.outputs import FinishReason, RequestOutput, StepStats
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.pooling import PoolingKind, PoolingParams
from nanoserve.core.request import GenerateRequest, Grammar
from nanoserve.core.sampling import MAX_SEED, SamplingParams
from nanoserve.serving.feed import FeedDoor
from nanoserve.serving.link import LinkServer
from nanoserve.serving.replica import EngineReplica
from nanoserve.serving.transport import SocketTransport
from nanoserve.serving.wire import (
    Answers,
    Control,
    FeedItem,
    Greeting,
    Hello,
    Items,
    Refusal,
    Submit,
    controls,
    frame,
    merge,
    news,
    read_frame,
)
from tests.serving import fakes
from tests.serving.feed_rig import QUICK, Log, answer, read, request, until


class Members:
    """What Serve would know: one replica and its address."""

    def __init__(self, server: LinkServer, address: tuple[str, int]) -> None:
        self._metadata = {"address": address, "secret": server.secret}

    def hold(self, name: str) -> bool:
        return True

    def release(self, name: str) -> None: ...

    def metadata(self, name: str) -> dict[str, Any]:
        return self._metadata


class Lease:
    """A handle whose calls are counted."""

    def __init__(self) -> None:
        self.num_open = 0
        self.lease = self

    def options(self, **_: Any) -> "Lease":
        return self

    def remote(self, door_id: str, *, target: str) -> "Lease":
        self.num_open += 1
        return self

    def cancel(self) -> None:
        self.num_open -= 1


class Linked:
    """One engine, its socket, and a door that calls it."""

    def __init__(self, server: LinkServer, replica: EngineReplica, address: tuple[str, int], members: Any) -> None:
        self.server, self.replica, self.address = server, replica, address
        self.lease = Lease()
        self.door = FeedDoor(SocketTransport(self.lease, members, "door"), QUICK, Log())


@pytest_asyncio.fixture
async def linked() -> AsyncIterator[Linked]:
    replica = EngineReplica(EngineArgs(max_queued_requests=8), fakes.make_engine, door_grace_s=0.2)
    server = LinkServer(replica)
    address = await server.start("127.0.0.1")
    linked = Linked(server, replica, address, Members(server, address))
    linked.door.set_members(frozenset({"a"}))
    await until(lambda: linked.door.trouble() is None)
    yield linked
    linked.door.leave()
    server.close()
    replica._engine.stop()


async def test_answers_over_the_socket_are_exact(linked: Linked) -> None:
    asked = [request(f"r{index}", seed=index, prompt=range(1, 300)) for index in range(5)]
    streams = [await linked.door.open(one) for one in asked]
    assert [(await read(stream))[0] for stream in streams] == [answer(one) for one in asked]
    assert linked.lease.num_open == 1


async def test_a_refusal_comes_back_as_the_error_it_was(linked: Linked) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await linked.door.open(request("long", prompt=range(1, 100_000)))
    assert "99999" in caught.value.message
    opening = [asyncio.create_task(linked.door.open(request(f"r{index}", 1000))) for index in range(200)]
    await asyncio.wait(opening)
    assert QueueFullError in {type(task.exception()) for task in opening}


async def test_a_broken_connection_is_made_again_and_nothing_is_lost(linked: Linked) -> None:
    asked = request("r", 60)
    stream = await linked.door.open(asked)
    assert (await stream.next()).new_token_ids
    transport_ = linked.door._transport
    assert isinstance(transport_, SocketTransport)
    transport_._links["a"]._writer.transport.abort()
    rest, _ = await read(stream)
    assert rest == answer(asked)[-len(rest) :]
    assert stream.attempt == 1, "the feed is resumed, not the request submitted again"


async def test_a_door_that_leaves_has_its_requests_stopped(linked: Linked) -> None:
    await linked.door.open(request("r", 1000))
    linked.door.leave()
    assert linked.lease.num_open == 0
    await until(lambda: not linked.replica._owners and not linked.replica._outboxes)


@pytest.mark.parametrize(
    "said",
    [
        frame(Greeting("wrong", "door", 0, "")),
        b"\x00\x00\x00\x02{}",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"",
    ],
    ids=["wrong secret", "not msgpack", "another protocol", "a frame of 4 GiB", "nothing"],
)
async def test_strangers_are_sent_away(linked: Linked, said: bytes) -> None:
    reader, writer = await asyncio.open_connection(*linked.address)
    writer.write(said)
    writer.write_eof()
    async with asyncio.timeout(2):
        assert await reader.read() == b""
    writer.close()
    assert (await read(await linked.door.open(request("r"))))[0] == answer(request("r"))


async def test_what_cannot_be_read_after_a_greeting_ends_the_connection(linked: Linked) -> None:
    reader, writer = await asyncio.open_connection(*linked.address)
    writer.write(frame(Greeting(linked.server.secret, "other", 0, "")))
    assert isinstance(news.decode(await read_frame(reader)), Hello)
    writer.write(b"\x00\x00\x00\x01\xc1")
    async with asyncio.timeout(2):
        while await reader.read(65536):
            pass
    writer.close()


def test_a_request_survives_the_wire() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_k=3,
        seed=MAX_SEED,
        stop_token_ids=[1, 2],
        logit_bias={7: -1.5},
        logprobs=2,
        prompt_logprobs=1,
        max_tokens=5,
    )
    sent = GenerateRequest(
        request_id="é\x00",
        prompt_token_ids=(1, 2**31),
        sampling=sampling,
        grammar=Grammar("start: /a/", (5,)),
        priority=-3,
        arrival_s=1.25,
        deadline_s=2.5,
        cache_salt="s",
        num_prior_output_tokens=1,
    )
    (got,) = controls.decode(frame(Control([Submit(sent)]))[4:]).ops
    assert isinstance(got, Submit)
    assert got.request == sent
    pooling = PoolingParams(kind=PoolingKind.EMBED, dimensions=8)
    (got,) = controls.decode(frame(Control([Submit(replace(sent, pooling=pooling))]))[4:]).ops
    assert isinstance(got, Submit)
    assert got.request.pooling == pooling
    assert got.request.pooling.kind is PoolingKind.EMBED


def test_news_survive_the_wire() -> None:
    entry = TokenLogprobs(token_id=5, logprob=-0.1, rank=2, top=((1, -0.2), (5, float("-inf"))))
    outputs = (
        RequestOutput("r", (1, 2), FinishReason.STOP, 2, (entry,), (entry,), 16, None),
        RequestOutput("q", error=("server_error", "It failed."), finish_reason=FinishReason.ERROR),
        RequestOutput("v", finish_reason=FinishReason.LENGTH, pooled=bytes(range(256))),
    )
    item = FeedItem(3, outputs, StepStats(step_id=9, blocks_published=(2**64 - 1,)), "running", "fine")
    got = news.decode(frame(Items([item]))[4:])
    assert isinstance(got, Items)
    assert got.items == [item]
    assert got.items[0].outputs[0].finish_reason is FinishReason.STOP
    assert merge(got.items[0].outputs[2:], "v") == outputs[2]


def test_a_queue_that_is_full_says_when_to_come_back() -> None:
    got = news.decode(frame(Answers([Refusal.of(QueueFullError("Full.", retry_after_s=7.5)), None]))[4:])
    assert isinstance(got, Answers)
    assert got.answers[0] is not None
    error = got.answers[0].error()
    assert isinstance(error, QueueFullError)
    assert (error.message, error.retry_after_s, error.code) == ("Full.", 7.5, "queue_full")
