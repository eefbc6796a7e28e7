"""The envelope is OpenAI's, small, and shows nothing of the server's inside."""

import orjson
import pytest

from nanoserve.core import errors as core_errors
from nanoserve.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    NanoserveError,
    QueueFullError,
    UnavailableError,
)
from nanoserve.protocol import errors
from nanoserve.protocol.errors import (
    INTERNAL_MESSAGE,
    AuthenticationError,
    MethodNotAllowedError,
    OutputError,
    as_known,
    envelope,
    headers_of,
    status_of,
)


def every_error_class() -> list[type[NanoserveError]]:
    found, todo = [], [NanoserveError]
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return [cls for cls in found if cls.__module__ in (core_errors.__name__, errors.__name__)]


@pytest.mark.parametrize("cls", every_error_class())
def test_every_type_has_a_status(cls: type[NanoserveError]) -> None:
    assert cls.type in errors.STATUS


@pytest.mark.parametrize(
    "error, status",
    [
        (InvalidRequestError("x"), 400),
        (AuthenticationError("x"), 401),
        (ModelNotFoundError("x"), 404),
        (QueueFullError("x"), 429),
        (EngineDeadError("x"), 500),
        (UnavailableError("x"), 503),
        (OutputError("timeout_error", "x"), 504),
        (OutputError("a type nobody knows", "x"), 500),
    ],
)
def test_a_type_maps_to_its_status(error: NanoserveError, status: int) -> None:
    assert status_of(error) == status


def test_the_envelope_has_four_members() -> None:
    body = orjson.loads(envelope(InvalidRequestError("`n` must be >= 1.", param="n", code="c")))
    assert body == {
        "error": {"message": "`n` must be >= 1.", "type": "invalid_request_error", "param": "n", "code": "c"}
    }


@pytest.mark.parametrize("text", ["x" * 100_000, "\U0001f9f5" * 50_000, "bad \ud83d"])
def test_the_envelope_is_small_and_valid_whatever_the_message(text: str) -> None:
    body = envelope(InvalidRequestError(text, param=text))
    assert len(body) < 8192
    assert orjson.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "reason",
    [
        'Traceback (most recent call last):\n  File "x.py"',
        "RuntimeError in /opt/app/nanoserve/engine/core.py",
        "ray::Engine.feed() died",
        "The actor EngineActor died",
        "CUDA error at 0x7f3a2b1c",
    ],
)
def test_an_internal_fault_keeps_its_inside_to_itself(reason: str) -> None:
    assert orjson.loads(envelope(EngineDeadError(reason)))["error"]["message"] == INTERNAL_MESSAGE
    assert orjson.loads(envelope(OutputError("server_error", reason)))["error"]["message"] == INTERNAL_MESSAGE


def test_a_harmless_reason_is_told_and_a_client_may_name_a_path() -> None:
    assert b"ran out of memory" in envelope(EngineDeadError("The engine ran out of memory."))
    assert b"/models/on/disk" in envelope(ModelNotFoundError("No model /models/on/disk."))


def test_an_unknown_exception_says_nothing() -> None:
    assert as_known(ValueError("secret")).message == INTERNAL_MESSAGE


def test_headers() -> None:
    assert headers_of(QueueFullError("x", retry_after_s=2.2)) == {"retry-after": "3"}
    assert headers_of(UnavailableError("x")) == {"retry-after": "1"}
    assert headers_of(MethodNotAllowedError("x", allow="GET")) == {"allow": "GET"}
    assert headers_of(InvalidRequestError("x")) == {}
