"""What the engine needs of whoever owns the tensors."""

from typing import Protocol

from nanoserve.core.plan import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Computes one step at a time, on the engine's thread.

    A step releases ``released_request_ids`` first, then copies blocks, then computes. An executor that raises is not
    called again, except for ``close``.
    """

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the plan's tokens; a result for every scheduled request that samples or scores."""
        ...

    def close(self) -> None:
        """Give back what it holds; the last call."""
        ...
