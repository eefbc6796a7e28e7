"""A door and engine replicas in one event loop, joined without Ray: the same classes, a transport that can break."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import NanoserveError
from nanoserve.core.outputs import FinishReason, RequestOutput, StepStats
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.serving.feed import DoorConfig, FeedDoor, FeedStream, Journal
from nanoserve.serving.replica import EngineReplica
from nanoserve.serving.wire import FeedItem, Hello, Op
from tests.serving import fakes


class BrokenError(Exception):
    """What a transport raises when the other side is gone."""


class MemoryTransport:
    """Reaches the replicas of this process. ``kill`` is a crash, ``cut`` breaks a feed whose engine lives on."""

    def __init__(self, door_id: str = "door") -> None:
        self.door_id = door_id
        self.replicas: dict[str, EngineReplica] = {}
        self.held: set[str] = set()
        self.released: list[str] = []
        self.ctl_calls: list[tuple[str, list[Op]]] = []
        self.unreachable: set[str] = set()
        self._broken: dict[str, asyncio.Event] = {}

    def add(self, peer_id: str, **args: Any) -> EngineReplica:
        self.replicas[peer_id] = EngineReplica(EngineArgs(**args), fakes.make_engine, door_grace_s=0.2)
        self._broken[peer_id] = asyncio.Event()
        return self.replicas[peer_id]

    def as_door(self, door_id: str) -> "MemoryTransport":
        """The same replicas for another door."""
        other = MemoryTransport(door_id)
        other.replicas, other._broken = self.replicas, self._broken
        return other

    def kill(self, peer_id: str) -> None:
        self.replicas.pop(peer_id)._engine.stop()
        self.cut(peer_id)

    def cut(self, peer_id: str) -> None:
        self._broken[peer_id].set()
        self._broken[peer_id] = asyncio.Event()

    async def feed(self, peer_id: str, seq: int, engine_id: str) -> AsyncGenerator[Hello | list[FeedItem], None]:
        feed = self._find(peer_id).feed(self.door_id, seq, engine_id)
        broken = asyncio.ensure_future(self._broken[peer_id].wait())
        news = asyncio.ensure_future(anext(feed))
        try:
            while True:
                await asyncio.wait({news, broken}, return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    raise BrokenError(peer_id)
                yield news.result()
                news = asyncio.ensure_future(anext(feed))
        except StopAsyncIteration:
            return
        finally:
            broken.cancel()
            news.cancel()
            await asyncio.gather(news, broken, return_exceptions=True)
            await feed.aclose()  # type: ignore[attr-defined]

    async def ctl(self, peer_id: str, ops: Sequence[Op]) -> list[NanoserveError | None]:
        self.ctl_calls.append((peer_id, list(ops)))
        await asyncio.sleep(0)
        return self._find(peer_id).ctl(self.door_id, ops)

    def hold(self, peer_id: str) -> bool:
        self.held.add(peer_id)
        return True

    def release(self, peer_id: str) -> None:
        self.held.discard(peer_id)
        self.released.append(peer_id)

    def _find(self, peer_id: str) -> EngineReplica:
        if peer_id not in self.replicas or peer_id in self.unreachable:
            raise BrokenError(peer_id)
        return self.replicas[peer_id]


class Log:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, StepStats]] = []
        self.ends: list[str] = []
        self.num_resubmits = 0
        self.num_first_tokens = 0
        self.paces: list[float] = []

    def step(self, peer_id: str, stats: StepStats) -> None:
        self.steps.append((peer_id, stats))

    def first_token(self, seconds: float) -> None:
        self.num_first_tokens += 1

    def next_tokens(self, seconds: float) -> None:
        assert seconds >= 0

    def paced(self, seconds_per_token: float) -> None:
        self.paces.append(seconds_per_token)

    def finished(self, reason: str, seconds: float) -> None:
        self.ends.append(reason)

    def resubmitted(self) -> None:
        self.num_resubmits += 1


QUICK = DoorConfig(engine_wait_s=0.3, failover_wait_s=3.0, readopt_after_s=0.3)


class Rig:
    """One door; ``join`` and ``leave`` are what Serve would say."""

    def __init__(self, config: DoorConfig = QUICK, journal: Journal | None = None) -> None:
        self.transport = MemoryTransport()
        self.log = Log()
        self.door = FeedDoor(self.transport, config, self.log, journal=journal)
        self._members: frozenset[str] = frozenset()

    async def join(self, *peer_ids: str, **args: Any) -> None:
        for peer_id in peer_ids:
            self.transport.add(peer_id, **args)
        self._members |= set(peer_ids)
        self.door.set_members(self._members)
        await until(lambda: self.door.trouble() is None)

    def leave(self, peer_id: str) -> None:
        self._members -= {peer_id}
        self.door.set_members(self._members)

    def running(self, peer_id: str) -> int:
        return next(peer for peer in self.door.peers if peer.peer_id == peer_id).stats.num_running

    async def close(self) -> None:
        for replica in self.transport.replicas.values():
            replica._engine.stop()


def request(name: str, max_tokens: int = 20, *, seed: int = 7, prompt: Sequence[int] = (1, 2, 3)) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


def answer(asked: GenerateRequest) -> list[int]:
    """What the fake model has to say to ``request(...)``."""
    sampling = asked.sampling
    return fakes.expected(list(asked.prompt_token_ids), sampling.seed or 0, sampling.max_tokens or 0)


async def read(stream: FeedStream) -> tuple[list[int], RequestOutput]:
    """All tokens to the end, and the last output."""
    token_ids: list[int] = []
    while True:
        output = await stream.next()
        assert output.request_id == stream.request.request_id
        token_ids += output.new_token_ids
        if output.finish_reason is not None:
            return token_ids, output


async def ask(rig: Rig, asked: GenerateRequest) -> list[int]:
    """The tokens of a request that has to end well."""
    token_ids, last = await read(await rig.door.open(asked))
    assert last.finish_reason is FinishReason.LENGTH, last
    return token_ids


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.005)


def slower(asked: GenerateRequest, max_tokens: int) -> GenerateRequest:
    return replace(asked, sampling=replace(asked.sampling, max_tokens=max_tokens))
