"""The Router deployment: an HTTP app around a feed door a model, in one process.

A plain class, decorated in ``app.py``. The app is bound late: Serve asks for it once the replica's event loop runs.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from nanoserve.serving.backstage import Backstage
from nanoserve.serving.config import ModelArgs, ServingArgs, deployment_name
from nanoserve.serving.feed import DoorConfig, FeedDoor
from nanoserve.serving.membership import engines_of
from nanoserve.serving.metrics import Metrics, render
from nanoserve.serving.timeline import Json, Timelines
from nanoserve.serving.transport import SocketTransport
from nanoserve.serving.usage import Usage

if TYPE_CHECKING:
    from nanoserve.serving.tracing import Tracing

logger = logging.getLogger(__name__)

PEER_SCRAPE_TIMEOUT_S = 2.0
Doors = Mapping[str, FeedDoor]
"""By the model's name."""

MakeApp = Callable[[Doors, Backstage, ServingArgs], Any]


class Router:
    """Owns the doors of this process. ``make_app`` builds the ASGI app around them."""

    def __init__(self, args: ServingArgs, engines: Mapping[str, DeploymentHandle], make_app: MakeApp) -> None:
        self._args = args
        self._engines = engines
        self._make_app = make_app
        self._context = serve.get_replica_context()
        self._metrics = {name: Metrics(self._context.replica_id.unique_id, name) for name in engines}
        self._usage = Usage(self._context.replica_id.unique_id)
        self._tracing = None if args.otlp_endpoint is None else _tracing(args.otlp_endpoint, self._context)
        self._timelines = Timelines(self._tracing)
        self._doors: dict[str, FeedDoor] = {}

    async def __serve_build_asgi_app__(self) -> Any:
        self._doors = {model.name: self._door(model) for model in self._args.served}
        backstage = Backstage(
            scrape=self._scrape,
            usage=self._usage,
            timelines=self._timelines,
            trace=None if self._tracing is None else self._tracing.wrap,
            ask_others=self._ask_others if self._args.num_routers > 1 else None,
        )
        return await asyncio.to_thread(self._make_app, self._doors, backstage, self._args)

    def _door(self, model: ModelArgs) -> FeedDoor:
        members = engines_of(deployment_name(self._args, model))
        transport = SocketTransport(self._engines[model.name], members, door_id=self._context.replica_id.unique_id)
        config = DoorConfig(
            max_open_requests=self._args.max_open_requests,
            engine_wait_s=self._args.engine_wait_s,
            failover_wait_s=self._args.failover_wait_s,
        )
        door = FeedDoor(transport, config, self._metrics[model.name], journal=self._timelines)
        members.bind(asyncio.get_running_loop(), door.set_members)
        return door

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; end those still open after ``seconds`` with an error event."""
        await asyncio.gather(*[door.drain(seconds) for door in self._doors.values()])

    async def door_families(self) -> list[Metric]:
        """What only this router can tell, for another one's ``/metrics``."""
        own = [
            family for name, door in self._doors.items() for family in self._metrics[name].door_families(door.num_open)
        ]
        return [*own, *self._usage.families()]

    async def find_timeline(self, tenant: str, id_: str) -> Json | None:
        """What this router knows of a request, for another one."""
        return self._timelines.find(tenant, id_)

    async def _ask_others(self, tenant: str, id_: str) -> Json | None:
        routers = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        async with asyncio.timeout(PEER_SCRAPE_TIMEOUT_S):
            found = await routers.broadcast("find_timeline", tenant, id_).results_async()
        return next((each for each in found if each is not None), None)

    def __del__(self) -> None:
        """Serve calls it on this replica's loop when its last request has ended."""
        for door in getattr(self, "_doors", {}).values():
            door.leave()
        if tracing := getattr(self, "_tracing", None):
            tracing.close()

    async def _scrape(self) -> bytes:
        families = [
            family for name, door in self._doors.items() for family in self._metrics[name].engine_families(door.peers)
        ]
        if self._args.num_routers == 1:
            return render([*families, *await self.door_families()])
        routers = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        async with asyncio.timeout(PEER_SCRAPE_TIMEOUT_S):
            for door in await routers.broadcast("door_families").results_async():
                families += door
        return render(families)


def _tracing(endpoint: str, context: Any) -> "Tracing":
    """Imported only where there are traces to send."""
    from nanoserve.serving.tracing import Tracing, otlp_exporter

    return Tracing(otlp_exporter(endpoint), context.replica_id.unique_id)
