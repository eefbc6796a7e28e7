"""What an HTTP app shares with the router it runs in."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from nanoserve.serving.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Backstage:
    """``scrape``: Prometheus text of the whole application. ``usage``: what tenants use at this router."""

    scrape: Callable[[], Awaitable[bytes]]
    usage: Usage
