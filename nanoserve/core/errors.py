"""Errors that a user may see. Each class has one stable ``type``; ``protocol/errors.py`` maps a type to an HTTP status.

The message is one sentence that says what to change; it never holds a traceback, a path of the server's code or a host.
"""

from typing import ClassVar


class NanoserveError(Exception):
    """Base of every error that is meant for a user.

    ``param`` names the offending request field or command-line flag, ``code`` is OpenAI's machine-readable code.
    """

    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(NanoserveError):
    """The client sent something that can never work."""

    type = "invalid_request_error"


class ModelNotFoundError(NanoserveError):
    """The requested model is not served here."""

    type = "not_found_error"


class QueueFullError(NanoserveError):
    """A bounded queue is full; the same request may be accepted ``retry_after_s`` seconds later."""

    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after_s = retry_after_s


class DeadlineError(NanoserveError):
    """The request's deadline passed before it was finished."""

    type = "timeout_error"


class UnavailableError(NanoserveError):
    """No engine can serve right now (starting, draining, lost)."""

    type = "service_unavailable_error"


class EngineDeadError(NanoserveError):
    """The engine stopped through a fault of its own; the message carries the reason."""

    type = "server_error"


class ShardLostError(EngineDeadError):
    """A rank of a tensor-parallel engine died, hangs or failed, so the engine cannot go on."""


class CheckpointError(NanoserveError):
    """A checkpoint cannot be loaded; the message names the file and the tensor."""

    type = "checkpoint_error"


class ConfigError(NanoserveError):
    """A setting, flag or config file is wrong, found before anything is served."""

    type = "config_error"
