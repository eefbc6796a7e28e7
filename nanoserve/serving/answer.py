"""Answers that end when their client leaves.

A response here is a coroutine that writes. While it runs, the connection is watched: when the client goes, the
coroutine is cancelled, and the ``finally`` blocks inside it give everything back. Watching costs nothing per token.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanoserve.core.errors import NanoserveError
from nanoserve.protocol.errors import as_known, envelope
from nanoserve.protocol.sse import PING, event

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStyle:
    """How a route's streams say what is no answer: that the server is still there, and that it failed."""

    ping: bytes = PING
    fault: Callable[[NanoserveError], bytes] = lambda error: event(envelope(error))


OPENAI_STYLE = StreamStyle()


async def until_gone(
    work: Awaitable[None], receive: Receive, *, idle_s: float, on_idle: Callable[[], Awaitable[None]]
) -> None:
    """Runs ``work``; cancels it when the client disconnects; calls ``on_idle`` every ``idle_s`` seconds until then."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        while not working.done() and not gone.done():
            done, _ = await asyncio.wait((working, gone), timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                await on_idle()
        if working.done():
            working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ReaderTooSlowError(Exception):
    """The client has taken nothing for too long; what waits for it is bounded by the answer, but not the time."""


class JsonWriter:
    """Sends one JSON body, once it is known."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def write(self, body: bytes) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


class EventWriter:
    """Sends events. The status line leaves with the first one, so that a failure before it still has its own status."""

    def __init__(self, send: Send, *, idle_s: float, stall_s: float = math.inf, ping: bytes = PING) -> None:
        self._send = send
        self._stall_s = stall_s
        self._num_waiting = 0  # writes that the client has not taken; several choices share a stream
        self._idle_s = idle_s
        self._ping = ping
        self._last_s = asyncio.get_running_loop().time()
        self._clock = asyncio.get_running_loop().time
        self.started = False

    async def write(self, events: bytes, *, last: bool = False) -> None:
        self._last_s = self._clock()
        self._num_waiting += 1
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})
        self._num_waiting -= 1

    async def ping(self) -> None:
        """Called now and then: a sign of life after a silence, so that nobody gives up on a slow first token.

        Raises:
            ReaderTooSlowError: a write has waited for too long.
        """
        silent_s = self._clock() - self._last_s
        if self._num_waiting and silent_s >= self._stall_s:
            raise ReaderTooSlowError
        if not self._num_waiting and silent_s >= self._idle_s:
            await self.write(self._ping)


class JsonAnswer(Response):
    """A plain reply: ``produce`` makes the body; its errors become the response's status."""

    def __init__(self, produce: Callable[[], Awaitable[bytes]]) -> None:
        self._produce = produce
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            await JsonWriter(send).write(await self._produce())

        await until_gone(work(), receive, idle_s=3600.0, on_idle=_nothing)


class EventAnswer(Response):
    """A stream of events: ``produce`` writes them.

    A client that takes nothing for ``stall_s`` seconds is dropped: the response is left unfinished, which makes the
    server close its connection.

    A fault before the first event keeps its status; after it, it is an event, and the stream ends without ``[DONE]``.
    """

    def __init__(
        self,
        produce: Callable[[EventWriter], Awaitable[None]],
        *,
        idle_s: float,
        stall_s: float = math.inf,
        style: StreamStyle = OPENAI_STYLE,
    ) -> None:
        self._produce = produce
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._style = style
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventWriter(send, idle_s=self._idle_s, stall_s=self._stall_s, ping=self._style.ping)
        idle_s = min(self._idle_s, self._stall_s) / 4
        try:
            await until_gone(self._told(writer), receive, idle_s=idle_s, on_idle=writer.ping)
        except ReaderTooSlowError:
            logger.warning("dropped a stream that was not read request_id=%s", scope.get("request_id"))

    async def _told(self, writer: EventWriter) -> None:
        try:
            await self._produce(writer)
        except Exception as error:
            if not writer.started:
                raise
            if not isinstance(error, NanoserveError):
                logger.exception("internal fault in a stream")
            await writer.write(self._style.fault(as_known(error)), last=True)


async def _nothing() -> None:
    pass
