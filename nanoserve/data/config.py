"""How a dataset is run through engines: names as in ``ray.data.llm``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from nanoserve.core.errors import ConfigError
from nanoserve.serving.config import ServingArgs

TaskType = Literal["generate", "embed", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """``model_source``: a folder, a hub id or "demo". ``engine_kwargs``: the fields of ``EngineArgs``.

    ``task_type``: what is done with each row, see ``rows``.
    ``concurrency``: how many engines, or (fewest, most). Each has ``max_concurrent_batches`` batches of ``batch_size``
    rows at work at once; their product should be some three times ``max_num_seqs``, because the rows of a batch end at
    different times. ``max_tasks_in_flight_per_actor`` None: twice the batches at work, so that the next ones are there.
    ``preserve_order`` gives rows back in their order; a slow row then holds up the ones behind it.
    ``num_cpus`` and ``num_gpus`` are what Ray reserves for an engine; None: a little CPU, and a GPU if it uses one.

    Raises:
        ConfigError: a value cannot work; the model itself is looked for where the engine starts.
    """

    model_source: str = "demo"
    task_type: TaskType = "generate"
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    concurrency: int | tuple[int, int] = 1
    max_concurrent_batches: int = 8
    max_tasks_in_flight_per_actor: int | None = None
    preserve_order: bool = False
    num_cpus: float | None = None
    num_gpus: float | None = None
    accelerator_type: str | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.task_type not in get_args(TaskType):
            known = ", ".join(get_args(TaskType))
            raise ConfigError(f"`task_type` must be one of {known}. Given: {self.task_type!r}.", param="task_type")
        for name in ("batch_size", "max_concurrent_batches"):
            _check_count(name, getattr(self, name))
        fewest, most = self.pool
        _check_count("concurrency", fewest)
        _check_count("concurrency", most)
        if fewest > most:
            raise ConfigError(f"`concurrency` ({fewest}, {most}) must be (fewest, most).", param="concurrency")
        if self.max_tasks_in_flight_per_actor is not None:
            _check_count("max_tasks_in_flight_per_actor", self.max_tasks_in_flight_per_actor)
        self.serving_args()

    @property
    def pool(self) -> tuple[int, int]:
        """(fewest, most) engines."""
        given = self.concurrency
        return (given, given) if isinstance(given, int) else (given[0], given[1])

    def serving_args(self) -> ServingArgs:
        """The settings of one engine, checked."""
        if "model" in self.engine_kwargs:
            raise ConfigError("`engine_kwargs` must not hold `model`; set `model_source`.", param="engine_kwargs")
        return ServingArgs.model_validate({"model": self.model_source, **self.engine_kwargs})


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"`{name}` must be an integer >= 1. Given: {value!r}.", param=name)
