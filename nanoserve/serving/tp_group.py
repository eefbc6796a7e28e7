"""The shards of a tensor-parallel engine as Ray actors in the placement group of its replica.

Ray places them, starts them and ends them with the replica; plans never go through Ray. An actor runs one call that
never returns, because a call a step would cost more than the step (0.7 ms against 30 us over a socket).
"""

import logging
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanoserve.model.parallel.channel import Meeting
from nanoserve.model.parallel.launcher import ChildProcesses, Launcher

logger = logging.getLogger(__name__)


class Shard:
    """One rank but the first. Its process ends with the replica's, whatever becomes of Ray."""

    def run(self, meeting: Meeting, rank: int) -> None:
        from nanoserve.model.parallel.shard import run

        run(meeting, rank)


class RayActors:
    """Rank r is an actor in bundle r; the replica itself lies in bundle 0."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group
        self._runs: dict[int, Any] = {}
        self._actors: list[Any] = []
        self.host = None if self._is_on_one_node() else ray.util.get_node_ip_address()

    def _is_on_one_node(self) -> bool:
        nodes = set(placement_group_table(self._group)["bundles_to_node_id"].values())
        if len(nodes) > 1:
            logger.warning("the ranks are on %d nodes: they sum over the network", len(nodes))
        return len(nodes) == 1

    def start(self, meeting: Meeting, num_ranks: int) -> None:
        for rank in range(1, num_ranks):
            bundle = self._group.bundle_specs[rank]
            actor = ray.remote(Shard).options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            )
            self._actors.append(actor.remote())
            self._runs[rank] = self._actors[-1].run.remote(meeting, rank)

    def died(self) -> str | None:
        for rank, run in self._runs.items():
            if ray.wait([run], timeout=0)[0]:
                return f"shard {rank} ended: {_reason(run)}"
        return None

    def stop(self) -> None:
        """One that hangs is killed by rank 0 where it can be, and by Ray with the placement group."""
        for actor in self._actors:
            ray.kill(actor)


def launcher(num_ranks: int) -> Launcher:
    """Actors where this process has a placement group for so many ranks, as a replica has; else child processes."""
    group = ray.util.get_current_placement_group() if ray.is_initialized() else None
    return RayActors(group) if group is not None and group.bundle_count >= num_ranks else ChildProcesses()


def _reason(run: Any) -> str:
    try:
        ray.get(run)
    except Exception as error:  # what Ray wraps around it
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else type(error).__name__
    return "it was told to"
