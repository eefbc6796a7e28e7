"""The Router deployment: an HTTP app around a feed door, in one process.

A plain class, decorated in ``app.py``. The app is bound late: Serve asks for it once the replica's event loop runs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from nanoserve.serving.config import ServingArgs
from nanoserve.serving.feed import DoorConfig, FeedDoor
from nanoserve.serving.membership import ENGINES
from nanoserve.serving.metrics import Metrics, render
from nanoserve.serving.transport import SocketTransport

logger = logging.getLogger(__name__)

PEER_SCRAPE_TIMEOUT_S = 2.0
Scrape = Callable[[], Awaitable[bytes]]
MakeApp = Callable[[FeedDoor, Scrape, ServingArgs], Any]


class Router:
    """Owns the door of this process. ``make_app`` builds the ASGI app around it."""

    def __init__(self, args: ServingArgs, engine: DeploymentHandle, make_app: MakeApp) -> None:
        self._args = args
        self._engine = engine
        self._make_app = make_app
        self._context = serve.get_replica_context()
        self._metrics = Metrics(self._context.replica_id.unique_id, args.served_model_name or args.engine.model)
        self._door: FeedDoor | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        transport = SocketTransport(self._engine, door_id=self._context.replica_id.unique_id)
        config = DoorConfig(
            max_open_requests=self._args.max_open_requests,
            engine_wait_s=self._args.engine_wait_s,
            failover_wait_s=self._args.failover_wait_s,
        )
        self._door = door = FeedDoor(transport, config, self._metrics)
        ENGINES.bind(asyncio.get_running_loop(), door.set_members)
        return await asyncio.to_thread(self._make_app, door, self._scrape, self._args)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; end those still open after ``seconds`` with an error event."""
        if self._door is not None:
            await self._door.drain(seconds)

    async def door_families(self) -> list[Metric]:
        """What only this router can tell, for another one's ``/metrics``."""
        return self._metrics.door_families(self._door.num_open if self._door else 0)

    def __del__(self) -> None:
        """Serve calls it on this replica's loop when its last request has ended."""
        if (door := getattr(self, "_door", None)) is not None:
            door.leave()

    async def _scrape(self) -> bytes:
        assert self._door is not None
        families = list(self._metrics.engine_families(self._door.peers))
        if self._args.num_routers == 1:
            return render([*families, *await self.door_families()])
        routers = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        async with asyncio.timeout(PEER_SCRAPE_TIMEOUT_S):
            for door in await routers.broadcast("door_families").results_async():
                families += door
        return render(families)
