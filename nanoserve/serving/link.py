"""The engine's end of the feed: a socket where doors call, one connection a door.

Serve's handles are left out of the tokens' way: a call over them costs ten times the CPU time and a millisecond each
way. They still decide who lives: a door holds a ``lease`` call open for as long as it needs the replica.
"""

import asyncio
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from nanoserve.core.errors import NanoserveError
from nanoserve.serving.wire import (
    Answers,
    FeedItem,
    Hello,
    Items,
    Op,
    Refusal,
    controls,
    frame,
    greetings,
    read_frame,
)

logger = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 5.0
HOST_VARIABLE = "NANOSERVE_ENGINE_HOST"
"""Names the address that engines listen on for doors; without it, it is their node's, so that other nodes reach it."""


class Replica(Protocol):
    """What doors ask for (``replica.EngineReplica``)."""

    def feed(self, door_id: str, seq: int, engine_id: str) -> AsyncIterator[Hello | list[FeedItem]]: ...
    def ctl(self, door_id: str, ops: Sequence[Op]) -> list[NanoserveError | None]: ...


class LinkServer:
    """Owns the socket and the connections of one engine. Whoever does not know ``secret`` is sent away."""

    def __init__(self, replica: Replica) -> None:
        self.secret = secrets.token_hex(16)
        self._replica = replica
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, host: str) -> tuple[str, int]:
        """Listens on a free port; returns the address."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, host, 0)
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        feeding: asyncio.Task[Any] | None = None
        self._writers.add(writer)
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                greeting = greetings.decode(await read_frame(reader))
            if not hmac.compare_digest(greeting.secret, self.secret):
                return
            feed = self._replica.feed(greeting.door_id, greeting.seq, greeting.engine_id)
            feeding = asyncio.create_task(self._feed(feed, writer))
            while True:
                control = controls.decode(await read_frame(reader))
                answers = self._replica.ctl(greeting.door_id, control.ops)
                writer.write(frame(Answers([None if error is None else Refusal.of(error) for error in answers])))
        except (EOFError, OSError, TimeoutError):
            pass  # the door went; `feeding` tells the replica
        except msgspec.MsgspecError as error:
            logger.warning("a door sent what cannot be read error=%.200s", error)
        finally:
            if feeding is not None:
                feeding.cancel()
            self._writers.discard(writer)
            writer.close()

    async def _feed(self, feed: AsyncIterator[Hello | list[FeedItem]], writer: asyncio.StreamWriter) -> None:
        """Passes the feed on; a slow door lets it pile up in its outbox, not here."""
        with suppress(OSError):
            async for part in feed:
                writer.write(frame(Items(part) if isinstance(part, list) else part))
                await writer.drain()
        writer.close()
