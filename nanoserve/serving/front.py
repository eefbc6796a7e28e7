"""What every request passes, whatever its route: an id, CORS, and a last net for faults. Pure ASGI.

Starlette's ``BaseHTTPMiddleware`` would copy each chunk through a memory stream of its own, several times the cost of
a token; these wrap ``send`` or nothing.
"""

import logging
import re
import uuid

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.core.errors import NanoserveError
from nanoserve.protocol.errors import (
    TYPE_OF_STATUS,
    MethodNotAllowedError,
    RouteNotFoundError,
    as_known,
    envelope,
    error_json,
    headers_of,
    messages_envelope,
    status_of,
)

logger = logging.getLogger(__name__)

_FINE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def error_response(error: NanoserveError, path: str) -> Response:
    """The refusal of a request to ``path``."""
    body = messages_envelope(error) if path.startswith("/v1/messages") else envelope(error)
    return Response(body, status_of(error), headers_of(error), "application/json")


async def on_nanoserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, NanoserveError)
    if status_of(error) >= 500:
        logger.warning("request failed: %s request_id=%s", error.message, request.scope.get("request_id"))
    return error_response(error, request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 (and whatever else it raises) in the envelope."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    place = f"{request.method} {path}"[:200]
    if error.status_code == 404:
        return error_response(RouteNotFoundError(f"There is no route {place}.", code="route_not_found"), path)
    if error.status_code == 405:
        allow = (error.headers or {}).get("allow") or (error.headers or {}).get("Allow") or ""
        return error_response(MethodNotAllowedError(f"{place} is not possible; use {allow}.", allow=allow), path)
    type_ = TYPE_OF_STATUS.get(error.status_code, "invalid_request_error")
    body = error_json(str(error.detail), type_)
    return Response(body, error.status_code, dict(error.headers or {}), "application/json")


class RequestIds:
    """Takes a clean ``x-request-id`` or makes one; returns it with every response unless Ray Serve does.

    It names the request in logs only: two requests may carry the same one at once.
    """

    def __init__(self, app: ASGIApp, *, returned: bool = True) -> None:
        self._app = app
        self._returned = returned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        request_id = given if _FINE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope["request_id"] = request_id
        if not self._returned:
            return await self._app(scope, receive, send)
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        return await self._app(scope, receive, send_with_id)


class Cors(CORSMiddleware):
    """Starlette's CORS, with its refusals in the error envelope."""

    def preflight_response(self, request_headers: object) -> Response:
        response = super().preflight_response(request_headers)  # type: ignore[arg-type]
        if response.status_code < 400:
            return response
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        body = error_json(bytes(response.body).decode("utf-8", "replace"), "invalid_request_error", code="cors_refused")
        return Response(body, response.status_code, kept, "application/json")


class Faults:
    """The last net: what no handler caught is logged with its traceback and answered as a bare 500.

    It also strips trailing slashes, so that ``/v1/models/`` is ``/v1/models`` without a redirect that loses the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        scope["path"] = scope["path"].rstrip("/") or "/"
        try:
            await self._app(scope, receive, watched_send)
        except Exception as fault:
            logger.exception("internal fault path=%s request_id=%s", scope["path"], scope.get("request_id"))
            if not started:
                await error_response(as_known(fault), scope["path"])(scope, receive, send)
