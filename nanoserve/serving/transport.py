"""The door's end of the feed: one connection to each engine, and a lease on it held through Serve's handle."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from nanoserve.core.errors import NanoserveError
from nanoserve.serving.membership import Membership
from nanoserve.serving.wire import Answers, Control, FeedItem, Greeting, Hello, Op, frame, news, read_frame


class SocketTransport:
    """Calls engines by the addresses that they told Serve.

    The lease is a streaming call that says nothing: while it is open, Serve counts the replica as busy and lets it
    live, so that a drain waits for this door's streams. It is pinned by the keyword ``target`` (``engine_router``).
    """

    def __init__(self, engine: DeploymentHandle, members: Membership, door_id: str) -> None:
        self._members = members
        self._leases = engine.options(stream=True)
        self._door_id = door_id
        self._held: dict[str, Any] = {}
        self._links: dict[str, _Link] = {}
        self._linked = asyncio.Event()

    async def feed(self, peer_id: str, seq: int, engine_id: str) -> AsyncGenerator[Hello | list[FeedItem], None]:
        metadata = self._members.metadata(peer_id)
        reader, writer = await asyncio.open_connection(*metadata["address"])
        writer.write(frame(Greeting(metadata["secret"], self._door_id, seq, engine_id)))
        link = _Link(writer)
        try:
            while True:
                word = news.decode(await read_frame(reader))
                if isinstance(word, Answers):
                    link.answered(word)
                elif isinstance(word, Hello):
                    self._lease(peer_id)
                    self._links[peer_id] = link
                    self._linked.set()
                    yield word
                else:
                    yield word.items
        finally:
            if self._links.get(peer_id) is link:
                del self._links[peer_id]
            link.close()

    async def ctl(self, peer_id: str, ops: Sequence[Op]) -> list[NanoserveError | None]:
        """Waits for a connection that is just being made anew; the caller bounds the wait."""
        while (link := self._links.get(peer_id)) is None:
            self._linked.clear()
            await self._linked.wait()
        answers = await link.ask(ops)
        return [None if refusal is None else refusal.error() for refusal in answers.answers]

    def hold(self, peer_id: str) -> bool:
        return self._members.hold(peer_id)

    def release(self, peer_id: str) -> None:
        if (lease := self._held.pop(peer_id, None)) is not None:
            lease.cancel()
        self._members.release(peer_id)

    def _lease(self, peer_id: str) -> None:
        if peer_id not in self._held:
            self._held[peer_id] = self._leases.lease.remote(self._door_id, target=peer_id)


class _Link:
    """An open connection; its answers come in the order of the questions."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._asked: deque[asyncio.Future[Answers]] = deque()

    async def ask(self, ops: Sequence[Op]) -> Answers:
        answer = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._writer.write(frame(Control(list(ops))))
        return await answer

    def answered(self, answers: Answers) -> None:
        if not (answer := self._asked.popleft()).done():
            answer.set_result(answers)

    def close(self) -> None:
        self._writer.close()
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(ConnectionError("the connection to the engine broke"))
