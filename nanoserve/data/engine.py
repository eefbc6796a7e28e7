"""The engine of one Ray Data actor: the serving path without HTTP and without a second process.

A door and an engine replica in one event loop, joined by calls instead of Ray's handles. So what holds for a service
holds here: when the engine dies its requests go on, with the tokens they have, at the one that takes its place.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import EngineDeadError, NanoserveError
from nanoserve.core.outputs import StepStats
from nanoserve.protocol.errors import type_of
from nanoserve.serving.config import ServingArgs
from nanoserve.serving.door import ServedModel
from nanoserve.serving.feed import DoorConfig, FeedDoor
from nanoserve.serving.http_door import HttpDoor, http_door
from nanoserve.serving.metrics import Metrics, render
from nanoserve.serving.replica import Deliver, Engine, EngineFactory, EngineReplica
from nanoserve.serving.wire import EngineCard, FeedItem, Hello, Op

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_PATIENCE_S = 3600.0
"""How long a request waits for an engine: as long as any checkpoint may take to load again."""

_LOOK_S = 0.25
_SAY_EVERY_S = 10.0


class LocalTransport:
    """``feed.Transport`` to replicas of this process. ``replicas``: who can be reached."""

    def __init__(self) -> None:
        self.replicas: dict[str, EngineReplica] = {}

    async def feed(self, peer_id: str, seq: int, engine_id: str) -> AsyncGenerator[Hello | list[FeedItem], None]:
        async for item in self.replicas[peer_id].feed("data", seq, engine_id):
            yield item

    async def ctl(self, peer_id: str, ops: Sequence[Op]) -> list[NanoserveError | None]:
        return self.replicas[peer_id].ctl("data", ops)

    def hold(self, peer_id: str) -> bool:
        return peer_id in self.replicas

    def release(self, peer_id: str) -> None:
        """Nothing is held: a replica lives until it is replaced."""


class Meter(Metrics):
    """Says now and then how far this engine is; Ray shows it at the driver."""

    def __init__(self, model: str, max_num_seqs: int) -> None:
        super().__init__("data", model)
        self._max_num_seqs = max_num_seqs
        self._since_s = time.monotonic()
        self._num_steps = 0
        self._num_running = 0
        self._num_tokens = 0
        self._told_tokens = 0
        self._num_ended = 0

    def step(self, peer_id: str, stats: StepStats) -> None:
        self._num_steps += 1
        self._num_running += stats.num_running
        self._num_tokens = stats.num_generated_tokens_total
        if time.monotonic() - self._since_s >= _SAY_EVERY_S:
            self._say()

    def finished(self, reason: str, seconds: float) -> None:
        super().finished(reason, seconds)
        self._num_ended += 1

    def _say(self) -> None:
        now_s = time.monotonic()
        rate = max(0, self._num_tokens - self._told_tokens) / (now_s - self._since_s)
        batch = self._num_running / self._num_steps
        print(  # Ray carries what an actor prints to the driver; its log level would swallow this
            f"nanoserve: {self._num_ended} requests ended, {rate:.0f} tok/s, "
            f"{batch:.1f} of {self._max_num_seqs} running on average",
            flush=True,
        )
        self._since_s, self._told_tokens, self._num_steps, self._num_running = now_s, self._num_tokens, 0, 0


class Turns:
    """Many may work together, or one alone. Whoever waits to be alone goes before those who come later."""

    def __init__(self) -> None:
        self._together = 0
        self._quiet = asyncio.Condition()
        self._alone = asyncio.Lock()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        async with self._alone:
            self._together += 1
        try:
            yield
        finally:
            async with self._quiet:
                self._together -= 1
                self._quiet.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._alone, self._quiet:
            await self._quiet.wait_for(lambda: self._together == 0)
            yield


class EngineHost:
    """Owns the engine of this process, the door to it, and their replacement.

    Constructed anywhere; everything else belongs to one event loop. A dead engine is replaced here; a stuck one cannot
    be ended, so the process exits, and Ray starts the actor and its batches again.

    Raises:
        ConfigError, CheckpointError: the engine cannot be made.
    """

    def __init__(self, args: ServingArgs, make_engine: EngineFactory, *, num_siblings: int = 1) -> None:
        self._args = args
        self._make_engine = make_engine
        self._num_siblings = num_siblings
        self._numbers = itertools.count()
        self._transport = LocalTransport()
        self._engine: Engine
        self._peer_id = self._make_replica()
        self._starting: asyncio.Future[HttpDoor] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._turns = Turns()

    async def door(self) -> HttpDoor:
        """The way to the engine, from any coroutine of one loop; starts it the first time."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def model(self) -> ServedModel:
        return (await self.door()).models()[0]

    async def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """``work``, and where the engine dies of it or beside it, ``work`` again with nothing beside it.

        Raises:
            NanoserveError: what ``work`` raises; EngineDeadError only when the engine dies of this very work.
        """
        try:
            async with self._turns.together():
                return await work()
        except NanoserveError as error:
            if type_of(error) != EngineDeadError.type:
                raise
        async with self._turns.alone():
            return await work()

    async def _start(self) -> HttpDoor:
        config = DoorConfig(
            max_open_requests=1_000_000, engine_wait_s=_PATIENCE_S, failover_wait_s=_PATIENCE_S, max_attempts=2
        )
        meter = Meter(self._args.name, self._args.engine.max_num_seqs)
        feed = FeedDoor(self._transport, config, meter)
        feed.set_members(frozenset({self._peer_id}))

        async def scrape() -> bytes:
            return render([*meter.engine_families(feed.peers), *meter.door_families(feed.num_open)])

        door = http_door({self._args.name: feed}, scrape, self._args)
        while not door.models():  # noqa: ASYNC110 - a feed has nobody to tell of its hello
            await asyncio.sleep(0.01)
        self._watching = asyncio.create_task(self._watch(feed))
        return door

    async def _watch(self, feed: FeedDoor) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            health = self._engine.health()
            if health.state == "stuck":
                _exit(health.reason)
            if health.state != "dead":
                continue
            logger.warning("engine died, another one is made reason=%s", health.reason)
            del self._transport.replicas[self._peer_id]
            try:
                self._peer_id = await asyncio.to_thread(self._make_replica)
            except Exception as error:  # a process that lost its engine and cannot have another is of no use
                _exit(str(error))
            feed.set_members(frozenset({self._peer_id}))

    def _make_replica(self) -> str:
        peer_id = f"engine-{next(self._numbers)}"
        self._transport.replicas[peer_id] = EngineReplica(self._args.engine, self._made, self._num_siblings)
        return peer_id

    def _made(self, args: EngineArgs, deliver: Deliver) -> tuple[Engine, EngineCard]:
        self._engine, card = self._make_engine(args, deliver)
        return self._engine, card


def _exit(reason: str) -> None:
    logger.error("this process ends, so that Ray starts another reason=%s", reason)
    logging.shutdown()
    os._exit(1)
