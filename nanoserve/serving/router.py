"""The Router deployment: an HTTP app around a feed door a model, in one process.

A plain class, decorated in ``app.py``. The app is bound late: Serve asks for it once the replica's event loop runs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from nanoserve.serving.config import ModelArgs, ServingArgs, deployment_name
from nanoserve.serving.feed import DoorConfig, FeedDoor
from nanoserve.serving.membership import engines_of
from nanoserve.serving.metrics import Metrics, render
from nanoserve.serving.transport import SocketTransport

logger = logging.getLogger(__name__)

PEER_TIMEOUT_S = 2.0
ROLL_CALL_PERIOD_S = 1.0
Scrape = Callable[[], Awaitable[bytes]]
Doors = Mapping[str, FeedDoor]
"""By the model's name."""

MakeApp = Callable[[Doors, Scrape, ServingArgs], Any]


class Router:
    """Owns the doors of this process. ``make_app`` builds the ASGI app around them."""

    def __init__(self, args: ServingArgs, engines: Mapping[str, DeploymentHandle], make_app: MakeApp) -> None:
        self._args = args
        self._engines = engines
        self._make_app = make_app
        self._context = serve.get_replica_context()
        self._metrics = {name: Metrics(self._context.replica_id.unique_id, name) for name in engines}
        self._doors: dict[str, FeedDoor] = {}
        self._watch: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        self._doors = {model.name: self._door(model) for model in self._args.served}
        self._watch = asyncio.get_running_loop().create_task(self._end_in_time(), context=Context())
        return await asyncio.to_thread(self._make_app, self._doors, self._scrape, self._args)

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

        door = FeedDoor(transport, config, self._metrics[model.name], wake=wake if model.sleeps else None)
        members.bind(asyncio.get_running_loop(), door.set_members)
        door.wake()
        return door

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; end those still open after ``seconds`` with an error event."""
        await asyncio.gather(*[door.drain(seconds) for door in self._doors.values()])

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
        routers = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        try:
            async with asyncio.timeout(PEER_TIMEOUT_S):
                return await self.router_id() in await routers.broadcast("router_id").results_async()
        except DeploymentUnavailableError:  # Serve lists none
            return False
        except Exception as error:
            logger.debug("roll call failed error=%.200r", error)
            return None

    async def door_families(self) -> list[Metric]:
        """What only this router can tell, for another one's ``/metrics``."""
        return [
            family for name, door in self._doors.items() for family in self._metrics[name].door_families(door.num_open)
        ]

    def __del__(self) -> None:
        """Serve calls it on this replica's loop when its last request has ended."""
        if watch := getattr(self, "_watch", None):
            watch.cancel()
        for door in getattr(self, "_doors", {}).values():
            door.leave()

    async def _scrape(self) -> bytes:
        families = [
            family for name, door in self._doors.items() for family in self._metrics[name].engine_families(door.peers)
        ]
        if self._args.num_routers == 1:
            return render([*families, *await self.door_families()])
        routers = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        async with asyncio.timeout(PEER_TIMEOUT_S):
            for door in await routers.broadcast("door_families").results_async():
                families += door
        return render(families)
