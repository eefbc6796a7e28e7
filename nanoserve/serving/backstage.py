"""What an HTTP app shares with the router it runs in."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from nanoserve.serving.timeline import Json, Timelines
from nanoserve.serving.usage import Usage


async def _nothing() -> bytes:
    return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backstage:
    """``scrape``: Prometheus text of the whole application. ``usage``: what tenants use at this router.

    ``timelines``: what happened to requests here; ``ask_others`` looks for one, by tenant and id, at the other routers.
    ``trace`` wraps the app where requests are traced.
    """

    scrape: Callable[[], Awaitable[bytes]] = _nothing
    usage: Usage = field(default_factory=Usage)
    timelines: Timelines = field(default_factory=Timelines)
    ask_others: Callable[[str, str], Awaitable[Json | None]] | None = None
    trace: Callable[[ASGIApp], ASGIApp] | None = None

    async def find_timeline(self, tenant: str, id_: str) -> Json | None:
        """Here, or at another router."""
        found = self.timelines.find(tenant, id_)
        if found is None and self.ask_others is not None:
            return await self.ask_others(tenant, id_)
        return found
