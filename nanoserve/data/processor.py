"""From a dataset to one with answers: three lazy stages over ``map`` and ``map_batches``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanoserve.data.config import EngineConfig
from nanoserve.data.rows import RowFunction, RowWorker, packing, unpacking
from nanoserve.serving.replica import EngineFactory, load_engine

if TYPE_CHECKING:
    from ray.data import Dataset

_ENGINE_CPUS = 0.1
"""What Ray reserves for an engine on a CPU; small, so that any number fits a laptop. Threads are set by the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Call it with a dataset. Nothing runs before the result is consumed."""

    config: EngineConfig
    preprocess: RowFunction | None = None
    postprocess: RowFunction | None = None
    preprocess_map_kwargs: Mapping[str, Any] = field(default_factory=dict)
    postprocess_map_kwargs: Mapping[str, Any] = field(default_factory=dict)
    make_engine: EngineFactory = load_engine

    def __call__(self, dataset: "Dataset") -> "Dataset":
        packed = dataset.map(packing(self.preprocess), **self.preprocess_map_kwargs)
        answered = through_engines(packed, RowWorker, self.config, self.make_engine)
        return answered.map(unpacking(self.postprocess), **self.postprocess_map_kwargs)


def build_processor(
    config: EngineConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """A function from a dataset to a dataset, as ``ray.data.llm.build_processor`` makes it.

    ``preprocess(row)`` returns the columns that ask: ``messages`` or ``prompt``, and ``sampling_params``; those of the
    row stay beside them. ``postprocess(row)`` returns what is kept; it finds ``generated_text``, ``generated_tokens``,
    ``num_input_tokens``, ``num_generated_tokens`` and ``finish_reason``. A row that cannot be answered, or on which a
    function fails, comes out as it is, with the reason in ``__inference_error__``; that column is empty elsewhere.
    """
    return Processor(
        config=config,
        preprocess=preprocess,
        postprocess=postprocess,
        preprocess_map_kwargs=preprocess_map_kwargs or {},
        postprocess_map_kwargs=postprocess_map_kwargs or {},
    )


def through_engines(
    dataset: "Dataset", worker: Callable[..., Any], config: EngineConfig, make_engine: EngineFactory, **more: Any
) -> "Dataset":
    """The engine stage: blocks of one batch, several of them at work at once in each actor of the pool.

    ``more`` goes to the worker, beside the config and what makes its engine.
    A block is what Ray repeats when an actor dies, so it is no larger than a batch; its rows leave together, which is
    why each row comes out exactly once.
    """
    from ray.data import ActorPoolStrategy

    fewest, most = config.pool
    in_flight = config.max_tasks_in_flight_per_actor or 2 * config.max_concurrent_batches
    if config.preserve_order:
        dataset.context.execution_options.preserve_order = True
    return dataset.repartition(target_num_rows_per_block=config.batch_size).map_batches(
        worker,
        fn_constructor_kwargs={"config": config, "make_engine": make_engine, **more},
        batch_size=config.batch_size,
        batch_format="numpy",
        zero_copy_batch=True,
        udf_modifying_row_count=False,
        compute=ActorPoolStrategy(
            min_size=fewest,
            max_size=most,
            max_tasks_in_flight_per_actor=in_flight,
            max_concurrent_calls_per_actor=config.max_concurrent_batches,
        ),
        **_resources(config),
    )


def _resources(config: EngineConfig) -> dict[str, Any]:
    num_gpus = float(config.serving_args().engine.device == "cuda") if config.num_gpus is None else config.num_gpus
    given = {"accelerator_type": config.accelerator_type, "runtime_env": config.runtime_env}
    return {
        "num_cpus": _ENGINE_CPUS if config.num_cpus is None else config.num_cpus,
        "num_gpus": num_gpus,
        **{name: value for name, value in given.items() if value is not None},
    }
