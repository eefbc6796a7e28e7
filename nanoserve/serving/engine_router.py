"""Serve's request router for the Engine deployment: the door has chosen already, this only finds the replica.

Keep nothing else in this module: Serve pickles it by value, so any state here would be a copy of its own.
"""

import asyncio
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ReplicaGoneError(Exception):
    """The replica that a call was pinned to is not there any more."""


class EngineRouter(RequestRouter):
    """Pins a call to the replica named by its keyword ``target``; tells ``membership`` of every change."""

    def initialize_state(self, deployment: str, **_: Any) -> None:
        self._deployment = deployment
        self._listed: list[RunningReplica] = []

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from nanoserve.serving.membership import engines_of

        loop = asyncio.get_running_loop()
        self._listed = list(replicas)

        def refresh() -> None:
            loop.call_soon_threadsafe(lambda: self.update_replicas(self._listed))

        held = engines_of(self._deployment).replicas_changed(self._listed, refresh)
        super().update_replicas(self._listed + held)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        from nanoserve.serving.membership import unique_id

        target = pending_request.kwargs.get("target") if pending_request is not None else None
        if target is None:
            return [candidate_replicas]
        found = [replica for replica in candidate_replicas if unique_id(replica) == target]
        if found:
            return [found]
        # An exception raised here would be logged, swallowed and retried for ever: hand it to the waiting caller.
        if pending_request is not None and not pending_request.future.done():
            pending_request.future.set_exception(ReplicaGoneError(target))
        return [candidate_replicas[:1]]
