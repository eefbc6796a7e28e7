"""The door's side of the feed: which engines there are, where each request runs, and what happens when one is lost.

Every token belongs to an attempt, named ``request_id.attempt``; what arrives for an attempt that is not open is
dropped, so a late token of a lost engine can never appear twice. When an engine is lost, its requests are submitted
again elsewhere as prompt plus the tokens so far; sampling is a function of (logits, seed, position), so they go on as
if nothing had happened.

Everything runs on one event loop. Work that outlives a call runs in a fresh context: Serve cancels handle calls made in
a request's context when that request's client leaves.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from nanoserve.core.errors import EngineDeadError, NanoserveError, QueueFullError, UnavailableError
from nanoserve.core.outputs import FinishReason, RequestOutput, StepStats
from nanoserve.core.request import GenerateRequest
from nanoserve.routing.kv_index import KVIndex, PrefixChain
from nanoserve.routing.policy import Demand, EngineLoad, rank
from nanoserve.serving.wire import Abort, EngineCard, FeedItem, Hello, Op, Ping, Submit, merge

logger = logging.getLogger(__name__)


_LOST = (EngineDeadError.type, UnavailableError.type)
"""Types of errors that end a request because its engine ended, not because of the request."""


class Transport(Protocol):
    """How a door reaches the replicas. Any exception means that the replica did not answer."""

    def feed(self, peer_id: str, seq: int, engine_id: str) -> AsyncGenerator[Hello | list[FeedItem], None]: ...
    async def ctl(self, peer_id: str, ops: Sequence[Op]) -> list[NanoserveError | None]: ...
    def hold(self, peer_id: str) -> bool: ...
    def release(self, peer_id: str) -> None: ...


class Observer(Protocol):
    """Who counts what happens at the door."""

    def step(self, peer_id: str, stats: StepStats) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def next_tokens(self, seconds: float) -> None: ...
    def paced(self, seconds_per_token: float) -> None: ...
    def finished(self, reason: str, seconds: float) -> None: ...
    def resubmitted(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """Bounds and patience of a door."""

    max_open_requests: int = 2048
    engine_wait_s: float = 10.0
    failover_wait_s: float = 60.0
    max_attempts: int = 3
    suspect_after_s: float = 2.5
    dead_after_s: float = 10.0
    ping_after_s: float = 2.0
    hello_timeout_s: float = 2.0
    readopt_after_s: float = 10.0


class PeerState(StrEnum):
    """NEW: feed not open yet. UP: takes work. RETIRING: finishes what it has. CLOSED: no feed any more."""

    NEW = "new"
    UP = "up"
    RETIRING = "retiring"
    CLOSED = "closed"


class EngineLostError(Exception):
    """The engine went away before it answered."""


@dataclass(slots=True, eq=False)
class _Call:
    """One op on its way; ``done`` is set for submits."""

    op: Op
    done: asyncio.Future[None] | None = None


@dataclass(slots=True, eq=False)
class Peer:
    """One engine replica as this door knows it; ``FeedDoor`` alone changes it."""

    peer_id: str
    heard_s: float
    told_s: float = 0.0
    state: PeerState = PeerState.NEW
    card: EngineCard | None = None
    seq: int = 0
    stats: StepStats = field(default_factory=StepStats)
    health: str = "idle"
    reason: str = ""
    num_breaks: int = 0
    streams: dict[str, "FeedStream"] = field(default_factory=dict)
    queue: list[_Call] = field(default_factory=list)
    in_flight: list[_Call] = field(default_factory=list)
    feeding: asyncio.Task[None] | None = None
    sending: asyncio.Task[None] | None = None

    def load(self) -> EngineLoad:
        return EngineLoad.of(self.peer_id, self.stats, num_booked=len(self.streams))


class FeedStream:
    """One open request: its tokens so far, and the output that its reader has not taken yet."""

    def __init__(self, door: "FeedDoor", request: GenerateRequest, now_s: float) -> None:
        self.request = request
        self.attempt = 0
        self.attempt_id = ""
        self.peer: Peer | None = None
        self.accepted = False
        self.finished = False
        self.emitted: list[int] = []
        self.num_prompt_logprobs = 0
        self.num_idle_losses = 0
        self.decided = asyncio.Event()
        self.opened_s = now_s
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.chain: PrefixChain | None = None
        self._skip_prompt_logprobs = 0
        self._door = door
        self._pending: list[RequestOutput] = []
        self._news = asyncio.Event()

    async def next(self) -> RequestOutput:
        """Everything since the last call as one output."""
        await self._news.wait()
        self._news.clear()
        pending, self._pending = self._pending, []
        return merge(pending, self.request.request_id)

    def close(self) -> None:
        """Stop the request if it runs; idempotent."""
        self._door.close(self)

    def next_attempt(self) -> GenerateRequest:
        """The request as the next engine has to see it: what was generated is now the end of its prompt."""
        self.attempt += 1
        self.attempt_id = f"{self.request.request_id}.{self.attempt}"
        self.accepted = False
        self._skip_prompt_logprobs = self.num_prompt_logprobs
        request = self.request
        if not self.emitted:
            return replace(request, request_id=self.attempt_id)
        return replace(
            request,
            request_id=self.attempt_id,
            prompt_token_ids=(*request.prompt_token_ids, *self.emitted),
            num_prior_output_tokens=request.num_prior_output_tokens + len(self.emitted),
            sampling=replace(request.sampling, prompt_logprobs=None),
        )

    def push(self, output: RequestOutput) -> None:
        if output.prompt_logprobs:
            output = self._without_repeats(output)
        self.emitted.extend(output.new_token_ids)
        if output.new_token_ids or output.finish_reason is not None:
            self.num_idle_losses = 0
            self.decided.set()
        self._pending.append(output)
        self._news.set()

    def _without_repeats(self, output: RequestOutput) -> RequestOutput:
        """A second attempt scores the prompt again; its reader has had the first entries already."""
        num_given, fresh = len(output.prompt_logprobs), output.prompt_logprobs[self._skip_prompt_logprobs :]
        self._skip_prompt_logprobs = max(0, self._skip_prompt_logprobs - num_given)
        self.num_prompt_logprobs += len(fresh)
        return RequestOutput(
            request_id=output.request_id,
            new_token_ids=output.new_token_ids,
            finish_reason=output.finish_reason,
            stop_token_id=output.stop_token_id,
            logprobs=output.logprobs,
            prompt_logprobs=fresh,
            num_cached_tokens=output.num_cached_tokens,
            error=output.error,
        )


class FeedDoor:
    """Owns peers and open streams of one router process."""

    def __init__(
        self,
        transport: Transport,
        config: DoorConfig,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``wake`` is given where there may be no engine while nobody asks; it returns when there is one."""
        self._transport = transport
        self._config = config
        self._observer = observer
        self._clock = clock
        self._wake = wake
        self._waking: asyncio.Task[None] | None = None
        self._card: EngineCard | None = None
        self._peers: dict[str, Peer] = {}
        self._kv = KVIndex()
        self._listed: frozenset[str] = frozenset()
        self._open: set[FeedStream] = set()
        self._changed = asyncio.Event()
        self._suspects = asyncio.Lock()
        self._emptied = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._spawn(self._watch())

    # ---- what the app asks

    async def open(self, request: GenerateRequest) -> FeedStream:
        """Returns once an engine has accepted the request.

        Raises:
            QueueFullError: this door or every engine is full. UnavailableError: no engine in time, or draining.
            InvalidRequestError: the engine can never run it.
        """
        if self._draining:
            raise UnavailableError("The service is shutting down; send the request again in a few seconds.")
        if len(self._open) >= self._config.max_open_requests:
            raise QueueFullError(f"{len(self._open)} requests are open, which is the limit; try again later.")
        stream = FeedStream(self, request, self._clock())
        self._open.add(stream)
        try:
            await self._place(stream, self._config.engine_wait_s)
        except NanoserveError:
            self._forget(stream)
            raise
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    def close(self, stream: FeedStream) -> None:
        if not stream.finished:
            self._end(stream, "abort", abort=True)

    @property
    def peers(self) -> Sequence[Peer]:
        return [peer for peer in self._peers.values() if peer.state is not PeerState.CLOSED]

    @property
    def num_open(self) -> int:
        return len(self._open)

    def card(self) -> EngineCard | None:
        """What the engines are, or were; all of one door serve the same model, so any will do."""
        return self._card

    def trouble(self) -> str | None:
        """Why no request could be served now; None when one could."""
        if self._draining:
            return "The service is shutting down."
        if any(self._serves(peer) for peer in self._peers.values()) or self._sleeps():
            return None
        reasons = [self._reason(peer) for peer in self.peers]
        return " ".join(reasons) or "No engine has started yet."

    def wake(self) -> None:
        """See to it that there is an engine, where they may sleep."""
        if self._wake is not None and (self._waking is None or self._waking.done()):
            self._waking = self._spawn(self._wake_one(self._wake))

    async def _wake_one(self, wake: Callable[[], Awaitable[None]]) -> None:
        try:
            await wake()
        except Exception as error:  # whatever Serve raises; who waits for the engine wakes it again
            logger.warning("waking an engine failed error=%.200r", error)

    def _sleeps(self) -> bool:
        return self._wake is not None and self._card is not None and not self.peers

    async def drain(self, seconds: float) -> None:
        """Take no new request; end those still open after ``seconds`` with an error."""
        self._draining = True
        await self.run_out(seconds)

    async def run_out(self, seconds: float) -> None:
        """End with an error what is still open after ``seconds``; new requests are taken until then."""
        if self._open:
            self._emptied.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), seconds)
        for stream in list(self._open):
            self._fail(stream, UnavailableError("The service is shutting down before the answer was finished."))

    def leave(self) -> None:
        """This process ends: let go of the engines, so that none waits for this door."""
        for peer in self.peers:
            self._close_peer(peer)
        for task in self._tasks:
            task.cancel()

    # ---- membership

    def set_members(self, listed: frozenset[str]) -> None:
        """Serve's list of running replicas changed."""
        self._listed = listed
        for peer_id in listed:
            if peer_id not in self._peers:
                self._adopt(peer_id)
        for peer in list(self._peers.values()):
            if peer.peer_id not in listed and peer.state in (PeerState.NEW, PeerState.UP):
                logger.info("engine leaves peer=%s num_streams=%d", peer.peer_id, len(peer.streams))
                peer.state = PeerState.RETIRING
                self._close_if_retired(peer)

    def _adopt(self, peer_id: str) -> None:
        if not self._transport.hold(peer_id):
            return
        peer = self._peers[peer_id] = Peer(peer_id, self._clock())
        peer.feeding = self._spawn(self._feed(peer))

    def _close_if_retired(self, peer: Peer) -> None:
        if peer.state is PeerState.RETIRING and not (peer.streams or peer.queue or peer.in_flight):
            self._close_peer(peer)

    def _close_peer(self, peer: Peer, readopt_after_s: float | None = None) -> None:
        peer.state = PeerState.CLOSED
        for task in (peer.feeding, peer.sending):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self._transport.release(peer.peer_id)
        self._kv.forget(peer.peer_id)
        self._changed.set()
        if peer.peer_id in self._listed:
            delay_s = self._config.readopt_after_s if readopt_after_s is None else readopt_after_s
            asyncio.get_running_loop().call_later(delay_s, self._forget_peer, peer)
        else:
            self._forget_peer(peer)

    def _forget_peer(self, peer: Peer) -> None:
        """Serve lists a dead replica a moment longer, so a closed peer is remembered; a false death ends here."""
        if self._peers.get(peer.peer_id) is peer:
            del self._peers[peer.peer_id]
            if peer.peer_id in self._listed:
                self._adopt(peer.peer_id)

    # ---- the feed

    async def _feed(self, peer: Peer) -> None:
        """Reads until the peer is closed; after a break it tries once to go on where it was."""
        while peer.state is not PeerState.CLOSED:
            try:
                await self._read(peer)
            except Exception as error:  # whatever the transport raises: the engine did not answer
                peer.num_breaks += 1
                logger.warning("feed broke peer=%s num_breaks=%d error=%.200r", peer.peer_id, peer.num_breaks, error)
            if peer.num_breaks >= 2:
                self._lose(peer, "The connection to the engine broke.")
            await asyncio.sleep(0.01)

    async def _read(self, peer: Peer) -> None:
        feed = self._transport.feed(peer.peer_id, peer.seq, peer.card.engine_id if peer.card else "")
        try:
            async with asyncio.timeout(self._config.hello_timeout_s if peer.card else self._config.dead_after_s):
                hello = await anext(feed)
            assert isinstance(hello, Hello), hello
            self._greet(peer, hello)
            async for items in feed:
                assert isinstance(items, list), items
                self._absorb(peer, items)
                if peer.state is PeerState.CLOSED:
                    return
        finally:
            await feed.aclose()

    def _greet(self, peer: Peer, hello: Hello) -> None:
        if peer.card is not None and not hello.resumed:
            # A submit may be on its way to the engine that has just dropped all we had there: begin anew.
            self._lose(peer, "The engine forgot this door.", readopt_after_s=0.1)
            return
        peer.card, peer.seq, peer.heard_s, peer.num_breaks = hello.card, hello.seq, self._clock(), 0
        self._card = hello.card
        if not hello.resumed:
            self._kv.reset(peer.peer_id, hello.blocks)
        if peer.state is PeerState.NEW:
            peer.state = PeerState.UP
            logger.info("engine up peer=%s engine_id=%s", peer.peer_id, hello.card.engine_id)
        self._changed.set()

    def _absorb(self, peer: Peer, items: list[FeedItem]) -> None:
        now_s, served, step_id = self._clock(), self._serves(peer), peer.stats.step_id
        for item in items:
            self._kv.update(peer.peer_id, item.stats.blocks_published, item.stats.blocks_evicted)
            for output in item.outputs:
                if (stream := peer.streams.get(output.request_id)) is not None:
                    self._deliver(stream, output, now_s)
                elif output.finish_reason is None:  # runs on for nobody: its submit arrived after we gave it up
                    self._send(peer, _Call(Abort(output.request_id)))
            if item.stats.step_id != step_id:
                step_id = item.stats.step_id
                self._observer.step(peer.peer_id, item.stats)
        last = items[-1]
        peer.seq, peer.stats, peer.health, peer.reason = last.seq, last.stats, last.state, last.reason
        peer.heard_s = now_s
        if not served and self._serves(peer):
            self._changed.set()
        if last.state in ("dead", "stuck"):
            self._lose(peer, last.reason)

    def _deliver(self, stream: FeedStream, output: RequestOutput, now_s: float) -> None:
        if output.error is not None and output.error[0] in _LOST:
            self._move(stream, output.error[1])
            return
        if output.new_token_ids:
            since = stream.last_token_s or stream.opened_s
            (self._observer.next_tokens if stream.last_token_s else self._observer.first_token)(now_s - since)
            stream.first_token_s, stream.last_token_s = stream.first_token_s or now_s, now_s
            self._settle(stream)
        stream.push(output)
        if output.finish_reason is not None:
            self._end(stream, output.finish_reason.value, abort=False)

    # ---- placing requests

    async def _place(self, stream: FeedStream, wait_s: float) -> None:
        give_up_s = self._clock() + wait_s
        full: dict[str, QueueFullError] = {}
        while not stream.finished:
            peer = await self._choose(stream, full, give_up_s)
            try:
                await self._submit(stream, peer)
                return
            except QueueFullError as error:
                full[peer.peer_id] = error
            except EngineLostError:
                pass
            except EngineDeadError as error:
                self._lose(peer, error.message)
            except NanoserveError:
                self._unbook(stream)
                raise
            self._unbook(stream)

    async def _choose(self, stream: FeedStream, full: dict[str, QueueFullError], give_up_s: float) -> Peer:
        """The best engine that is not full; waits for one while there is none at all."""
        while True:
            serving = {peer.peer_id: peer for peer in self._peers.values() if self._serves(peer)}
            ranked = rank([peer.load() for peer in serving.values()], self._demand(stream, serving))
            for load in ranked:
                if load.key not in full:
                    return serving[load.key]
            if serving:
                raise min(full.values(), key=lambda error: error.retry_after_s)
            self.wake()
            try:
                async with asyncio.timeout(give_up_s - self._clock()):
                    self._changed.clear()
                    await self._changed.wait()
            except TimeoutError:
                raise UnavailableError(self.trouble() or "No engine is available.") from None

    def _demand(self, stream: FeedStream, serving: Mapping[str, Peer]) -> Demand:
        """Prefixes are looked up only where there is a choice."""
        request = stream.request
        chain = None
        if len(serving) > 1 and (card := self.card()) is not None:
            chain = PrefixChain(
                (*request.prompt_token_ids, *stream.emitted),
                block_size=card.block_size,
                salts=(card.cache_salt, request.adapter or "", request.cache_salt),
            )
        stream.chain = chain
        first_block = next(iter(chain), None) if chain is not None else None
        return Demand(
            num_tokens=len(request.prompt_token_ids) + len(stream.emitted),
            tie=request.request_id if first_block is None else f"{first_block:x}",
            session_id=request.session_id,
            hit_tokens={} if chain is None else self._kv.hit_tokens(chain),
        )

    def _settle(self, stream: FeedStream) -> None:
        """The engine has told of the prompt's blocks by now, or never will."""
        if stream.chain is not None and stream.peer is not None:
            self._kv.settle(stream.peer.peer_id, stream.chain)
        stream.chain = None

    async def _submit(self, stream: FeedStream, peer: Peer) -> None:
        request = stream.next_attempt()
        stream.peer = peer
        peer.streams[stream.attempt_id] = stream
        if stream.chain is not None:
            self._kv.expect(peer.peer_id, stream.chain)
        call = _Call(Submit(request), asyncio.get_running_loop().create_future())
        self._send(peer, call)
        assert call.done is not None
        await call.done

    def _send(self, peer: Peer, call: _Call) -> None:
        peer.queue.append(call)
        if peer.sending is None or peer.sending.done():
            peer.sending = self._spawn(self._send_all(peer))

    async def _send_all(self, peer: Peer) -> None:
        """One call at a time, so that an abort never overtakes its submit; what comes meanwhile goes with the next."""
        while peer.queue and peer.state is not PeerState.CLOSED:
            peer.in_flight, peer.queue, peer.told_s = peer.queue, [], self._clock()
            try:
                async with asyncio.timeout(self._config.dead_after_s):
                    answers = await self._transport.ctl(peer.peer_id, [call.op for call in peer.in_flight])
            except Exception as error:
                logger.warning("control call failed peer=%s error=%.200r", peer.peer_id, error)
                self._lose(peer, "The engine does not answer.")
                return
            calls, peer.in_flight = peer.in_flight, []
            for call, answer in zip(calls, answers, strict=True):
                self._answer(peer, call, answer)
        self._close_if_retired(peer)

    def _answer(self, peer: Peer, call: _Call, answer: NanoserveError | None) -> None:
        if call.done is None or call.done.done():
            return
        if answer is not None:
            call.done.set_exception(answer)
            return
        # Booked here and not by the waiting coroutine: the engine may be lost before that one runs again.
        if isinstance(call.op, Submit) and (stream := peer.streams.get(call.op.request.request_id)) is not None:
            stream.accepted = True
        call.done.set_result(None)

    # ---- losing engines

    def _lose(self, peer: Peer, reason: str, readopt_after_s: float | None = None) -> None:
        """The engine is gone: every request it ran goes on elsewhere."""
        if peer.state is PeerState.CLOSED:
            return
        logger.warning("engine lost peer=%s num_streams=%d reason=%s", peer.peer_id, len(peer.streams), reason)
        calls, peer.queue, peer.in_flight = [*peer.in_flight, *peer.queue], [], []
        streams = list(peer.streams.values())
        self._close_peer(peer, readopt_after_s)
        for call in calls:
            if call.done is not None and not call.done.done():
                call.done.set_exception(EngineLostError())
        for stream in streams:
            if stream.accepted:
                self._move(stream, reason)

    def _move(self, stream: FeedStream, reason: str) -> None:
        """To another engine, unless it was lost too often in a row without a token in between."""
        self._unbook(stream)
        stream.num_idle_losses += 1
        stream.decided.set()
        if stream.num_idle_losses >= self._config.max_attempts:
            lost = f"{stream.num_idle_losses} times with its engine"
            self._fail(stream, EngineDeadError(f"The answer was lost {lost}: {reason}"))
            return
        self._observer.resubmitted()
        suspect = stream.num_idle_losses >= self._config.max_attempts - 1
        self._spawn(self._replace_alone(stream) if suspect else self._replace(stream))

    async def _replace_alone(self, stream: FeedStream) -> None:
        """It may be what ends engines: one such stream at a time until it gets a token, so that no other dies of it."""
        async with self._suspects:
            stream.decided.clear()
            await self._replace(stream)
            if not stream.finished:
                await stream.decided.wait()

    async def _replace(self, stream: FeedStream) -> None:
        try:
            await self._place(stream, self._config.failover_wait_s)
        except NanoserveError as error:
            self._fail(stream, error)
        if stream.finished and stream.peer is not None:  # its reader left while it was being placed
            self._send(stream.peer, _Call(Abort(stream.attempt_id)))
            self._unbook(stream)

    def _fail(self, stream: FeedStream, error: NanoserveError) -> None:
        if stream.finished:
            return
        stream.push(
            RequestOutput(
                request_id=stream.attempt_id, finish_reason=FinishReason.ERROR, error=(error.type, error.message)
            )
        )
        self._end(stream, "error", abort=True)

    def _end(self, stream: FeedStream, reason: str, *, abort: bool) -> None:
        self._forget(stream)
        self._observer.finished(reason, self._clock() - stream.opened_s)
        if len(stream.emitted) > 1:
            self._observer.paced((stream.last_token_s - stream.first_token_s) / (len(stream.emitted) - 1))
        if abort and stream.peer is not None and stream.peer.state is not PeerState.CLOSED:
            self._send(stream.peer, _Call(Abort(stream.attempt_id)))
        self._unbook(stream)

    def _forget(self, stream: FeedStream) -> None:
        stream.finished = True
        stream.decided.set()
        self._open.discard(stream)
        if not self._open:
            self._emptied.set()

    def _unbook(self, stream: FeedStream) -> None:
        self._settle(stream)
        peer, stream.peer, stream.accepted = stream.peer, None, False
        if peer is not None:
            peer.streams.pop(stream.attempt_id, None)
            self._close_if_retired(peer)

    # ---- watching

    async def _watch(self) -> None:
        """Closes engines that have been silent for too long. A pause of this loop itself is not their silence."""
        period_s = 0.5
        before_s = self._clock()
        while True:
            await asyncio.sleep(period_s)
            now_s = self._clock()
            late_s, before_s = now_s - before_s - period_s, now_s
            for peer in self.peers:
                if late_s > period_s:
                    peer.heard_s += late_s
                if peer.card and now_s - peer.told_s > self._config.ping_after_s:
                    self._send(peer, _Call(Ping()))
                if peer.card and now_s - peer.heard_s > self._config.dead_after_s:
                    self._lose(peer, f"It has not been heard of for {now_s - peer.heard_s:.0f} s.")

    def _serves(self, peer: Peer) -> bool:
        silence_s = self._clock() - peer.heard_s
        return (
            peer.state is PeerState.UP
            and peer.health in ("idle", "running")
            and silence_s < self._config.suspect_after_s
        )

    def _reason(self, peer: Peer) -> str:
        if peer.state is PeerState.NEW:
            return "The engine is starting."
        if peer.state is PeerState.RETIRING:
            return "The engine is leaving."
        if peer.health not in ("idle", "running"):
            return f"The engine is {peer.health}: {peer.reason}"
        return f"The engine has been silent for {self._clock() - peer.heard_s:.1f} s."

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
