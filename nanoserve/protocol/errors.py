"""Errors on the wire: OpenAI's envelope, and the one table from a ``NanoserveError.type`` to an HTTP status.

Invariant: nothing that describes the server's inside (tracebacks, paths, actor names) leaves through this module.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import orjson

from nanoserve.core.errors import InvalidRequestError, NanoserveError

STATUS: Mapping[str, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "not_found_error": 404,
    "method_not_allowed_error": 405,
    "request_timeout_error": 408,
    "request_too_large_error": 413,
    "unsupported_media_type_error": 415,
    "rate_limit_error": 429,
    "server_error": 500,
    "checkpoint_error": 500,
    "config_error": 500,
    "service_unavailable_error": 503,
    "timeout_error": 504,
}
TYPE_OF_STATUS: Mapping[int, str] = {status: type_ for type_, status in reversed(list(STATUS.items()))}
INTERNAL_MESSAGE = "The server failed while it worked on this request; the reason is in its log."
_MAX_MESSAGE_BYTES = 4096
_MAX_PARAM_CHARS = 128
_INSIDE = re.compile(r"Traceback|ray::|\w+Actor\b|File \"|0x[0-9a-f]{6}|(?:^|[\s'\"(=])(?:/[\w.@-]+){2,}|[\w.-]+\.py\b")


class AuthenticationError(NanoserveError):
    """The API key is missing or wrong."""

    type = "authentication_error"


class MethodNotAllowedError(NanoserveError):
    """The path exists, but not for this method; ``allow`` is the Allow header."""

    type = "method_not_allowed_error"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message, code="method_not_allowed")
        self.allow = allow


class RouteNotFoundError(NanoserveError):
    """No route has this path."""

    type = "not_found_error"


class ResponseNotFoundError(NanoserveError):
    """No response of this id is remembered here."""

    type = "not_found_error"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"No response {response_id[:100]!r} is stored here. A router remembers its own last responses only, in"
            " memory: it may be too old, was sent with `store`: false, or was made by another router. Send the whole"
            " conversation as `input` instead.",
            param="previous_response_id",
            code="previous_response_not_found",
        )


class ItemNotFoundError(NanoserveError):
    """No item of this id belongs to a response that is remembered here."""

    type = "not_found_error"

    def __init__(self, item_id: str) -> None:
        message = f"No item {item_id[:100]!r} of a stored response is known here. Send the item itself instead."
        super().__init__(message, param="input", code="item_not_found")


class BodyTimeoutError(NanoserveError):
    """The client took too long to send its body."""

    type = "request_timeout_error"


class BodyTooLargeError(NanoserveError):
    """The body is longer than the server reads."""

    type = "request_too_large_error"


class MediaTypeError(NanoserveError):
    """The body's type or encoding is not one that the server reads."""

    type = "unsupported_media_type_error"


class OutputError(NanoserveError):
    """A request failed after it was accepted; carries the (type, message) of its ``RequestOutput``."""

    def __init__(self, type_: str, message: str) -> None:
        super().__init__(message)
        self.output_type = type_


def type_of(error: NanoserveError) -> str:
    return error.output_type if isinstance(error, OutputError) else error.type


def status_of(error: NanoserveError) -> int:
    return STATUS.get(type_of(error), 500)


def envelope(error: NanoserveError) -> bytes:
    """The JSON of OpenAI's error object. An internal fault keeps its message only where that shows no inside."""
    status, message = status_of(error), error.message
    if status == 500 and _INSIDE.search(message):
        message = INTERNAL_MESSAGE
    type_ = type_of(error) if type_of(error) in STATUS else "server_error"
    return error_json(message, type_, param=error.param, code=error.code)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Lets the errors of a request that was read as another route's body name the fields that its sender knows."""
    try:
        yield
    except InvalidRequestError as error:
        old = error.param
        if old is None or old not in names:
            raise
        message = error.message.replace(f"`{old}", f"`{names[old]}")
        raise InvalidRequestError(message, param=names[old], code=error.code) from None


def messages_envelope(error: NanoserveError) -> bytes:
    """The same, as Anthropic's clients know an error too: the object itself is of type ``error``."""
    return b'{"type":"error",' + envelope(error)[1:]


def error_json(message: str, type_: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """``{"error": {...}}`` with a message that fits into 4 KiB and is valid UTF-8 whatever the client sent."""
    text = message.encode("utf-8", "replace")
    if len(text) > _MAX_MESSAGE_BYTES:
        text = text[:_MAX_MESSAGE_BYTES] + b" ..."
    short = None if param is None else param[:_MAX_PARAM_CHARS].encode("utf-8", "replace").decode()
    error = {"message": text.decode("utf-8", "ignore"), "type": type_, "param": short, "code": code}
    return orjson.dumps({"error": error})


def headers_of(error: NanoserveError) -> dict[str, str]:
    """The headers that an error brings: Retry-After, Allow or WWW-Authenticate."""
    if isinstance(error, MethodNotAllowedError):
        return {"allow": error.allow}
    if isinstance(error, AuthenticationError):
        return {"www-authenticate": "Bearer"}
    if status_of(error) in (429, 503):
        return {"retry-after": str(max(1, math.ceil(getattr(error, "retry_after_s", 1.0))))}
    return {}


def as_known(error: Exception) -> NanoserveError:
    """The error itself when it is meant for a user, else one that says nothing of the fault."""
    return error if isinstance(error, NanoserveError) else NanoserveError(INTERNAL_MESSAGE, code="internal_error")
