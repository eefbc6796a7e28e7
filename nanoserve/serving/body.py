"""Reads a request body: bounded in bytes and in time, JSON by its content type."""

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from nanoserve.protocol.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError

# A bare `curl -d` says form-urlencoded and many small clients say nothing; both are read as JSON all the same.
_JSON_TYPES = ("", "application/json", "application/x-www-form-urlencoded")


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The raw body.

    Raises:
        MediaTypeError: it is declared as something else than JSON, or compressed.
        BodyTooLargeError: it is longer than ``max_bytes``; found as soon as it is known, not at the end.
        BodyTimeoutError: it did not come within ``timeout_s``.
    """
    _check_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise BodyTimeoutError(f"The body did not arrive within {timeout_s:g} s.") from None
    except ClientDisconnect:
        raise BodyTimeoutError("The client left before its body was complete.") from None
    return bytes(body)


def _check_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _JSON_TYPES and not media_type.endswith("+json"):
        raise MediaTypeError(f"The body must be application/json. Given: {media_type[:100]}.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise MediaTypeError(f"The body must not be compressed. Given: content-encoding {encoding[:50]}.")


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is longer than {max_bytes} bytes, the most that this server reads.")
