"""The fold: schedule, execute, update."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.outputs import RequestOutput, StepStats
from nanoserve.core.plan import ModelRunnerOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.engine.executor import Executor
from nanoserve.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUpdate:
    """What a step, or a while of idling, brought: news of requests, and the counts after it."""

    outputs: tuple[RequestOutput, ...]
    stats: StepStats


class EngineCore:
    """Owns the scheduler and drives the executor; one thread calls it.

    ``cache_salt`` is the model's identity in block hashes. ``clock`` is what deadlines are read against.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        *,
        cache_salt: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.scheduler = Scheduler(config, cache_salt=cache_salt, clock=clock)
        self._executor = executor

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never fit, or its id is in use.
            QueueFullError: the queue's bounds are reached.
        """
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request in any state; the next step tells so. An unknown id is ignored."""
        self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to compute or to tell."""
        return self.scheduler.has_work

    def step(self) -> EngineUpdate:
        """One step. What the executor raises passes through, and then the engine is of no further use."""
        start_s = time.perf_counter()
        plan = self.scheduler.schedule()
        planned_s = time.perf_counter()
        is_empty = not plan.scheduled and not plan.block_copies
        result = ModelRunnerOutput(step_id=plan.step_id) if is_empty else self._executor.execute(plan)
        executed_s = time.perf_counter()
        outputs = self.scheduler.update(plan, result)
        stats = self.scheduler.stats(
            schedule_s=planned_s - start_s,
            execute_s=executed_s - planned_s,
            update_s=time.perf_counter() - executed_s,
        )
        return EngineUpdate(outputs=outputs, stats=stats)

    def idle(self) -> EngineUpdate:
        """The counts without a step."""
        return EngineUpdate(outputs=(), stats=self.scheduler.stats())

    def close(self) -> None:
        self._executor.close()
