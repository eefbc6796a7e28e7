"""The feed over Serve's deployment handles: no port and no secret of our own; Ray's transport and TLS apply."""

from collections.abc import AsyncGenerator, Sequence

from ray.serve.handle import DeploymentHandle

from nanoserve.core.errors import NanoserveError
from nanoserve.serving.membership import ENGINES
from nanoserve.serving.wire import FeedItem, Hello, Op


class HandleTransport:
    """Calls pinned to one replica by the keyword ``target``, which ``engine_router`` reads."""

    def __init__(self, engine: DeploymentHandle, door_id: str) -> None:
        pickled = {"request_serialization": "pickle", "response_serialization": "pickle"}
        self._calls = engine.options(**pickled)
        self._feeds = engine.options(stream=True, **pickled)
        self._door_id = door_id

    async def feed(self, peer_id: str, seq: int, engine_id: str) -> AsyncGenerator[Hello | list[FeedItem], None]:
        generator = self._feeds.feed.remote(self._door_id, seq, engine_id, target=peer_id)
        try:
            async for item in generator:
                yield item
        finally:
            generator.cancel()

    async def ctl(self, peer_id: str, ops: Sequence[Op]) -> list[NanoserveError | None]:
        answers: list[NanoserveError | None] = await self._calls.ctl.remote(self._door_id, list(ops), target=peer_id)
        return answers

    def hold(self, peer_id: str) -> bool:
        return ENGINES.hold(peer_id)

    def release(self, peer_id: str) -> None:
        ENGINES.release(peer_id)
