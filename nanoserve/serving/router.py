"""The Router deployment: an HTTP app around a feed door a model, in one process.

A plain class, decorated in ``app.py``. The app is bound late: Serve asks for it once the replica's event loop runs.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
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

PEER_TIMEOUT_S = 2.0
ROLL_CALL_PERIOD_S = 1.0
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
        self._watch: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        self._doors = {model.name: self._door(model) for model in self._args.served}
        self._watch = asyncio.get_running_loop().create_task(self._end_in_time(), context=Context())
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
            engine_wait_s=self._args.cold_start_wait_s if model.sleeps else self._args.engine_wait_s,
            failover_wait_s=self._args.failover_wait_s,
        )

        async def wake() -> None:
            await self._engines[model.name].wake.remote()

        door = FeedDoor(
            transport,
            config,
            self._metrics[model.name],
            journal=self._timelines,
            wake=wake if model.sleeps else None,
        )
        members.bind(asyncio.get_running_loop(), door.set_members)
        door.wake()
        return door

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; end those still open after ``seconds`` with an error event."""
        await asyncio.gather(*[door.drain(seconds) for door in self._doors.values()])

    @property
    def _routers(self) -> DeploymentHandle:
        """All routers of the application, this one among them; Serve keeps the handle."""
        return serve.get_deployment_handle(self._context.deployment, self._context.app_name)

    async def router_id(self) -> str:
        """Answers a roll call."""
        return str(self._context.replica_id.unique_id)

    async def _end_in_time(self) -> None:
        """Serve tells no replica that its drain begins: it has begun when the list of routers lacks this one.

        What still runs after ``drain_s`` ends with an error event; Serve would cut it off without a word.
        """
        was_called, num_missed = False, 0
        while num_missed < 2:
            await asyncio.sleep(ROLL_CALL_PERIOD_S)
            called = await self._is_called()
            was_called = was_called or called is True
            if called is not None:
                num_missed = 0 if called or not was_called else num_missed + 1
        logger.info("leaving drain_s=%g", self._args.drain_s)
        await asyncio.gather(*[door.run_out(self._args.drain_s) for door in self._doors.values()])

    async def _is_called(self) -> bool | None:
        """Whether Serve lists this router; None where something, a router that dies for one, spoils the roll call."""
        try:
            async with asyncio.timeout(PEER_TIMEOUT_S):
                return await self.router_id() in await self._routers.broadcast("router_id").results_async()
        except DeploymentUnavailableError:  # Serve lists none
            return False
        except Exception as error:
            logger.debug("roll call failed error=%.200r", error)
            return None

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
        async with asyncio.timeout(PEER_TIMEOUT_S):
            found = await self._routers.broadcast("find_timeline", tenant, id_).results_async()
        return next((each for each in found if each is not None), None)

    def __del__(self) -> None:
        """Serve calls it on this replica's loop when its last request has ended."""
        if watch := getattr(self, "_watch", None):
            watch.cancel()
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
        async with asyncio.timeout(PEER_TIMEOUT_S):
            for door in await self._routers.broadcast("door_families").results_async():
                families += door
        return render(families)


def _tracing(endpoint: str, context: Any) -> "Tracing":
    """Imported only where there are traces to send."""
    from nanoserve.serving.tracing import Tracing, otlp_exporter

    return Tracing(otlp_exporter(endpoint), context.replica_id.unique_id)
