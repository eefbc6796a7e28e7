"""The builder's typed arguments: what a Serve config file's ``args`` and the flags of ``nanoserve serve`` may say."""

import re
from dataclasses import fields
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError

ENGINE_KEYS = frozenset(field.name for field in fields(EngineArgs))


class ModelArgs(BaseModel):
    """One model and its engines. Written flat: the fields of ``EngineArgs`` stand beside these.

    ``num_replicas`` engines, or between ``min_replicas`` and ``max_replicas`` by what the engines report: requests,
    waiting tokens, KV blocks, and ``ttft_goal_s``, the seconds that a request may wait for its first step. A signal has
    to last for ``upscale_delay_s`` or ``downscale_delay_s``. With ``min_replicas`` 0 idle engines go, and requests wait
    at the door for one to come back.
    ``num_cpus`` and ``num_gpus`` are what Ray reserves for one engine; None: a little CPU, and a GPU if there is one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    engine: EngineArgs = EngineArgs()
    served_model_name: str | None = Field(default=None, min_length=1)
    num_replicas: int = Field(default=1, ge=1)
    min_replicas: int | None = Field(default=None, ge=0)
    max_replicas: int | None = Field(default=None, ge=1)
    upscale_delay_s: float = Field(default=3.0, ge=0)
    downscale_delay_s: float = Field(default=60.0, ge=0)
    ttft_goal_s: float | None = Field(default=None, gt=0)
    num_cpus: float | None = Field(default=None, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)

    @model_validator(mode="wrap")
    @classmethod
    def _flat(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Sorts the flat keys, and says what is wrong in one sentence instead of pydantic's report.

        Raises:
            ConfigError: an unknown key, a value of the wrong type or out of range.
        """
        if isinstance(data, dict):
            known = ENGINE_KEYS | cls.model_fields.keys()
            if unknown := sorted(set(data) - known - {"engine"}):
                raise ConfigError(f"Unknown setting `{unknown[0]}`. Known: {', '.join(sorted(known - {'engine'}))}.")
            engine = {key: value for key, value in data.items() if key in ENGINE_KEYS}
            data = {key: value for key, value in data.items() if key not in ENGINE_KEYS}
            if engine:
                data = {"engine": engine} | data
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError(_sentence(error)) from None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ConfigError("`min_replicas` and `max_replicas` must be given together.")
        if self.min_replicas and self.max_replicas and self.min_replicas > self.max_replicas:
            raise ConfigError(f"`min_replicas` ({self.min_replicas}) must be <= `max_replicas` ({self.max_replicas}).")
        return self

    @property
    def sleeps(self) -> bool:
        """Whether there may be no engine while nobody asks."""
        return self.min_replicas == 0

    @property
    def name(self) -> str:
        """What requests call the model."""
        return self.served_model_name or self.engine.model


class ServingArgs(ModelArgs):
    """Arguments of ``nanoserve.serving:build``: one model, written beside these, or several in ``models``.

    ``num_routers`` doors serve all models. ``drain_s``: how long a stopping router lets its streams run before it ends
    them. A request waits ``engine_wait_s`` for an engine, ``cold_start_wait_s`` where engines may sleep, and
    ``failover_wait_s`` after it lost one.
    """

    models: tuple[ModelArgs, ...] = ()
    num_routers: int = Field(default=1, ge=1)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_open_requests: int = Field(default=2048, ge=1)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    engine_wait_s: float = Field(default=10.0, ge=0)
    cold_start_wait_s: float = Field(default=600.0, ge=0)
    failover_wait_s: float = Field(default=60.0, ge=0)
    door_grace_s: float = Field(default=5.0, ge=0)
    drain_s: float = Field(default=30.0, ge=0)

    @model_validator(mode="after")
    def _consistent_service(self) -> Self:
        if not all(self.api_keys):
            raise ConfigError("`api_keys` must not hold an empty key.")
        beside = sorted(self.model_fields_set & ModelArgs.model_fields.keys())
        if self.models and beside:
            raise ConfigError(f"With `models`, `{beside[0]}` and its like belong to the items of that list.")
        names = [deployment_name(self, model) for model in self.models]
        if twice := [model.name for model in self.models if names.count(deployment_name(self, model)) > 1]:
            raise ConfigError(f"`models` holds {twice[0]!r} twice; give each its own `served_model_name`.")
        return self

    @property
    def served(self) -> tuple[ModelArgs, ...]:
        """The models, one or several."""
        return self.models or (self,)


def deployment_name(args: ServingArgs, model: ModelArgs) -> str:
    """What Serve calls the engines of a model; it makes file names of that, so a hub id's slash becomes a dash."""
    return "Engine:" + re.sub(r"[^\w.-]", "-", model.name) if args.models else "Engine"


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"] if part != "engine") or "args"
    return f"`{name}`: {first['msg']}. Given: {first['input']!r:.200}."
