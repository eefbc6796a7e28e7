"""What the HTTP app needs of whoever carries its requests to engines. The app knows no transport: this is the seam."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nanoserve.core.outputs import RequestOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.text.pooling import PoolingPreprocessor
from nanoserve.text.preprocess import ModelLimits, Preprocessor
from nanoserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model as this door serves it.

    ``created``: Unix seconds when it was loaded. ``pooling`` None: it only generates.
    """

    name: str
    created: int
    limits: ModelLimits
    tokenizer: Tokenizer
    preprocessor: Preprocessor
    pooling: PoolingPreprocessor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether requests can be answered. ``healthy``: at least one engine makes progress or is idle; ``ready``: new
    requests are taken. ``reason`` says why not; ``details`` is shown as it is."""

    healthy: bool
    ready: bool
    reason: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


class RequestStream(Protocol):
    """The answer to one request, as it grows."""

    async def next(self) -> RequestOutput:
        """All that came since the last call, merged into one; not called again after a finish reason."""

    def close(self) -> None:
        """Idempotent. Aborts the request if it is not finished."""


class Door(Protocol):
    """The way to the engines."""

    async def open(self, request: GenerateRequest, model: str) -> RequestStream:
        """Returns once an engine of the model of this name accepted the request.

        Raises:
            NanoserveError: no engine can take it: its queue is full, it can never fit, there is no engine ...
        """

    def models(self) -> Sequence[ServedModel]:
        """The models served now; empty while none is loaded."""

    async def health(self) -> Health: ...

    async def metrics(self) -> bytes:
        """Prometheus text of the whole application."""
