"""The Engine deployment: one in-process engine, its tokens fanned out to the doors that asked for them.

A plain class, decorated in ``app.py``. Everything here runs on the replica's event loop, except ``_on_step``, which the
engine's thread calls once a step to hand its update over with one wake-up of the loop.
"""

import asyncio
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray.util

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import NanoserveError
from nanoserve.core.outputs import RequestOutput, StepStats
from nanoserve.core.request import GenerateRequest
from nanoserve.model.threads import default_threads
from nanoserve.serving.link import HOST_VARIABLE, LinkServer
from nanoserve.serving.wire import Abort, EngineCard, FeedItem, Hello, Op, Ping

logger = logging.getLogger(__name__)

RING_ITEMS = 4096
RING_VECTOR_BYTES = 64 * 2**20
HEARTBEAT_S = 0.5
DOOR_TIMEOUT_S = 10.0


class Update(Protocol):
    """What an engine reports after a step (``engine.core.EngineUpdate``)."""

    @property
    def outputs(self) -> tuple[RequestOutput, ...]: ...
    @property
    def stats(self) -> StepStats: ...


class Health(Protocol):
    """How an engine is (``engine.async_engine.EngineHealth``)."""

    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...


class Engine(Protocol):
    """What a replica needs of an engine (``engine.async_engine.AsyncEngine``)."""

    def start(self) -> None: ...
    def submit(self, request: GenerateRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stop(self) -> None: ...
    def health(self) -> Health: ...


Deliver = Callable[[Update], None]
EngineFactory = Callable[[EngineArgs, Deliver], tuple[Engine, EngineCard]]


@dataclass(slots=True)
class _Outbox:
    """The items for one door: a ring to resume from, and who reads it now. Embeddings bound it too, by their bytes."""

    items: deque[FeedItem] = field(default_factory=deque)
    seq: int = 0
    num_vector_bytes: int = 0
    heard_s: float = field(default_factory=time.monotonic)
    reader: object | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    grace: asyncio.TimerHandle | None = None

    def push(self, outputs: tuple[RequestOutput, ...], stats: StepStats, health: Health) -> None:
        self.seq += 1
        self.items.append(FeedItem(self.seq, outputs, stats, health.state, health.reason))
        self.num_vector_bytes += _vector_bytes(outputs)
        while len(self.items) > RING_ITEMS or (self.num_vector_bytes > RING_VECTOR_BYTES and len(self.items) > 1):
            self.num_vector_bytes -= _vector_bytes(self.items.popleft().outputs)
        self.wake.set()

    def can_resume(self, seq: int) -> bool:
        return self.seq - len(self.items) <= seq <= self.seq

    def since(self, seq: int) -> list[FeedItem]:
        """Items after ``seq``, oldest first. A reader is nearly always at the tip, so the walk starts there."""
        news: list[FeedItem] = []
        for item in reversed(self.items):
            if item.seq <= seq:
                break
            news.append(item)
        news.reverse()
        return news


class EngineReplica:
    """Owns the engine, the map from request to door, and one outbox a door."""

    def __init__(
        self, args: EngineArgs, make_engine: EngineFactory, num_siblings: int = 1, door_grace_s: float = 5.0
    ) -> None:
        """``num_siblings`` engines share this machine's cores, unless ``args`` sets the threads."""
        self._door_grace_s = door_grace_s
        self._owners: dict[str, str] = {}
        self._outboxes: dict[str, _Outbox] = {}
        self._link = LinkServer(self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stats = StepStats()
        self._queue_s = 0.0
        self._cached: set[int] = set()
        self._beat_s = 0.0
        # Ray sets OMP_NUM_THREADS to the CPUs it reserved, which is one: the engine must be told.
        args = replace(args, num_threads=args.num_threads or max(1, default_threads() // num_siblings))
        self._engine, self._card = make_engine(args, self._on_step)
        logger.info("engine ready engine_id=%s info=%s", self._card.engine_id, self._card.info)

    async def lease(self, door_id: str, target: str | None = None) -> AsyncIterator[bool]:
        """While this call is open, Serve counts the replica as busy. ``target`` is read by the request router only."""
        logger.debug("leased door_id=%s", door_id)
        yield True
        await asyncio.Event().wait()

    async def feed(self, door_id: str, seq: int, engine_id: str) -> AsyncIterator[Hello | list[FeedItem]]:
        """A ``Hello``, then everything this door has to know, until the door leaves.

        ``seq`` and ``engine_id`` name the last item the door saw.
        """
        self._start()
        outbox, resumed = self._attach(door_id, seq, engine_id)
        reader = outbox.reader = object()
        seq = seq if resumed else outbox.seq
        try:
            yield Hello(self._card, resumed, seq, [] if resumed else list(self._cached))
            while outbox.reader is reader and outbox.can_resume(seq):
                if news := outbox.since(seq):
                    seq = news[-1].seq
                    yield news
                else:
                    outbox.wake.clear()
                    await outbox.wake.wait()
        finally:
            if outbox.reader is reader:
                self._detach(door_id, outbox)

    def ctl(self, door_id: str, ops: Sequence[Op]) -> list[NanoserveError | None]:
        """Submits and aborts of one tick, in order; per op None or why it was refused. Runs on the replica's loop."""
        self._start()
        if door_id not in self._outboxes:
            self._detach(door_id, self._outboxes.setdefault(door_id, _Outbox()))
        self._outboxes[door_id].heard_s = time.monotonic()
        return [self._apply(door_id, op) for op in ops]

    async def check_health(self) -> None:
        """Raises where the engine cannot go on, so that Serve replaces the replica."""
        self._start()
        health = self._engine.health()
        if health.state in ("dead", "stuck"):
            raise RuntimeError(f"The engine is {health.state}: {health.reason}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The signals of ``autoscaling``."""
        stats = self._stats
        return {
            "running": float(stats.num_running),
            "waiting": float(stats.num_waiting),
            "waiting_tokens": float(stats.num_waiting_tokens),
            "kv_usage": 1.0 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            "queue_s": self._queue_s,
        }

    async def wake(self) -> None:
        """Nothing: while there is no engine, Serve starts one for the sake of this call."""

    async def record_replica_metadata(self) -> dict[str, Any]:
        """What Serve tells every door of this replica: where to call."""
        address = await self._link.start(os.environ.get(HOST_VARIABLE) or ray.util.get_node_ip_address())
        return {"engine_id": self._card.engine_id, "address": address, "secret": self._link.secret}

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            self._link.close()
            engine.stop()

    def _start(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._engine.start()
            self._beat_s = time.monotonic()
            self._loop.call_later(HEARTBEAT_S, self._heartbeat)

    def _on_step(self, update: Update) -> None:
        """Called on the engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fan_out, update)

    def _fan_out(self, update: Update) -> None:
        self._stats = update.stats
        for queue_s in update.stats.queue_times_s:
            self._queue_s += 0.2 * (queue_s - self._queue_s)
        self._cached.difference_update(update.stats.blocks_evicted)
        self._cached.update(update.stats.blocks_published)
        by_door: dict[str, list[RequestOutput]] = {}
        for output in update.outputs:
            take = self._owners.get if output.finish_reason is None else self._owners.pop
            if (door_id := take(output.request_id, None)) is not None:
                by_door.setdefault(door_id, []).append(output)
        health = self._engine.health()
        for door_id, outbox in self._outboxes.items():
            outbox.push(tuple(by_door.get(door_id, ())), update.stats, health)

    def _heartbeat(self) -> None:
        """Says that this loop lives and how the engine is, also while the engine's thread is silent.

        A door that is silent itself has died without a word to Serve (its feed would hold up a drain): it is dropped,
        unless the silence was a pause of this loop.
        """
        assert self._loop is not None
        now_s = time.monotonic()
        late_s, self._beat_s = now_s - self._beat_s - HEARTBEAT_S, now_s
        self._loop.call_later(HEARTBEAT_S, self._heartbeat)
        health = self._engine.health()
        for door_id, outbox in list(self._outboxes.items()):
            outbox.heard_s += late_s if late_s > HEARTBEAT_S else 0.0
            outbox.push((), self._stats, health)
            if now_s - outbox.heard_s > DOOR_TIMEOUT_S:
                outbox.reader = None
                self._forget(door_id)

    def _apply(self, door_id: str, op: Op) -> NanoserveError | None:
        if isinstance(op, Ping):
            return None
        if isinstance(op, Abort):
            self._owners.pop(op.request_id, None)
            self._engine.abort(op.request_id)
            return None
        self._owners[op.request.request_id] = door_id
        try:
            self._engine.submit(op.request)
        except NanoserveError as error:
            self._owners.pop(op.request.request_id, None)
            return error
        return None

    def _attach(self, door_id: str, seq: int, engine_id: str) -> tuple[_Outbox, bool]:
        outbox = self._outboxes.setdefault(door_id, _Outbox())
        if outbox.grace is not None:
            outbox.grace.cancel()
            outbox.grace = None
        resumed = engine_id == self._card.engine_id and outbox.can_resume(seq)
        if not resumed:
            self._abort_all(door_id)
        outbox.heard_s = time.monotonic()
        outbox.wake.set()
        return outbox, resumed

    def _detach(self, door_id: str, outbox: _Outbox) -> None:
        """The door is gone, perhaps for a moment: its requests run on for a grace period."""
        outbox.reader = None
        loop = asyncio.get_running_loop()
        outbox.grace = loop.call_later(self._door_grace_s, self._forget, door_id)

    def _forget(self, door_id: str) -> None:
        num_aborted = self._abort_all(door_id)
        self._outboxes.pop(door_id, None)
        logger.info("door left door_id=%s num_aborted=%d", door_id, num_aborted)

    def _abort_all(self, door_id: str) -> int:
        request_ids = [request_id for request_id, owner in self._owners.items() if owner == door_id]
        for request_id in request_ids:
            self._engine.abort(request_id)
            del self._owners[request_id]
        return len(request_ids)


def _vector_bytes(outputs: Sequence[RequestOutput]) -> int:
    return sum([len(output.pooled) for output in outputs])


def load_engine(args: EngineArgs, deliver: Deliver) -> tuple[Engine, EngineCard]:
    """The real engine: checkpoint, scheduler and thread.

    Raises:
        CheckpointError, ConfigError: the model cannot be served with these settings.
    """
    from dataclasses import asdict

    began_s = time.monotonic()
    from nanoserve.engine.async_engine import AsyncEngine
    from nanoserve.engine.core import EngineCore
    from nanoserve.model.build import build

    imported_s = time.monotonic()
    loaded = build(args)
    core = EngineCore(loaded.runner, loaded.scheduler, cache_salt=loaded.info.name)
    card = EngineCard(
        engine_id=uuid.uuid4().hex,
        max_model_len=loaded.scheduler.max_model_len,
        vocab_size=loaded.info.vocab_size,
        num_blocks=loaded.scheduler.num_blocks,
        block_size=loaded.scheduler.block_size,
        cache_salt=loaded.info.name,
        max_num_seqs=loaded.scheduler.max_num_seqs,
        info=asdict(loaded.info)
        | {"imports_s": round(imported_s - began_s, 2), "load_s": round(time.monotonic() - imported_s, 2)},
    )
    compile_grammar = loaded.compile_grammar
    return AsyncEngine(core, deliver, beats=lambda: loaded.runner.num_beats, compile_grammar=compile_grammar), card
