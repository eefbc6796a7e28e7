"""One line of an OpenAI batch file: judged, answered, and written as OpenAI writes it.

A request goes through the service's own HTTP app, in process: bodies, limits and errors are those of the service.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import httpx
import orjson

from nanoserve.core.errors import EngineDeadError
from nanoserve.data.config import EngineConfig
from nanoserve.data.engine import EngineHost
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.serving.replica import EngineFactory

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank")
_MAX_BODY_BYTES = 1 << 30  # the file is the user's own


class LineError(Exception):
    """The line is no request; ``code`` as OpenAI names it, ``custom_id`` where there is one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A line that may be asked of an engine."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def line_id(line: bytes, model: str, occurrence: int) -> str:
    """Names a line of the output after its request, so that a later run knows what has been answered.

    ``occurrence``: how many equal lines came before it in the file.
    """
    digest = blake2b(b"\0".join((line, model.encode(), str(occurrence).encode())), digest_size=16)
    return f"batch_req_{digest.hexdigest()}"


def parse(line: bytes) -> BatchRequest:
    """
    Raises:
        LineError: no JSON object, a member that is missing or of the wrong type, or one that no route answers.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LineError("invalid_json_line", f"This line is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise LineError("invalid_json_line", "This line is not a JSON object.")
    given = value.get("custom_id")
    custom_id = given if isinstance(given, str) and given else None
    if custom_id is None:
        raise LineError("missing_required_parameter", "`custom_id` must be a non-empty string.")
    if value.get("method") != "POST":
        raise LineError("invalid_method", f"`method` must be POST. Given: {value.get('method')!r:.100}.", custom_id)
    if value.get("url") not in URLS:
        message = f"`url` must be one of {', '.join(URLS)}. Given: {value.get('url')!r:.100}."
        raise LineError("invalid_url", message, custom_id)
    body = value.get("body")
    if not isinstance(body, dict):
        raise LineError("missing_required_parameter", "`body` must be a JSON object.", custom_id)
    if body.get("stream"):
        raise LineError("invalid_request", "`stream` must not be set in a batch.", custom_id)
    return BatchRequest(custom_id=custom_id, url=value["url"], body=body)


def response_line(id_: str, custom_id: str, reply: httpx.Response) -> bytes:
    """A request that was answered, also by an error of the API."""
    response = {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id", ""),
        "body": orjson.Fragment(reply.content),
    }
    return orjson.dumps({"id": id_, "custom_id": custom_id, "response": response, "error": None})


def error_line(id_: str, error: LineError) -> bytes:
    """A line that was never asked."""
    said = {"code": error.code, "message": error.message}
    return orjson.dumps({"id": id_, "custom_id": error.custom_id, "response": None, "error": said})


def num_completion_tokens(reply: bytes) -> int:
    usage = orjson.loads(reply).get("usage") or {}
    return int(usage.get("completion_tokens", 0))


class LineWorker:
    """The engine stage of a batch. A row names a line by its place in ``path``, which every actor can read."""

    def __init__(self, config: EngineConfig, make_engine: EngineFactory, path: str) -> None:
        self._host = EngineHost(config.serving_args(), make_engine, num_siblings=config.pool[1])
        self._file = os.open(path, os.O_RDONLY)
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        places = zip(batch["id"], batch["offset"], batch["length"], strict=True)
        works = [self._answered(str(id_), os.pread(self._file, int(n), int(at))) for id_, at, n in places]
        lines = await asyncio.gather(*works)
        return {"line": [line for line, _, _ in lines], "num_tokens": [n for _, n, _ in lines],
                "ok": [ok for _, _, ok in lines]}  # fmt: skip

    async def _answered(self, id_: str, line: bytes) -> tuple[bytes, int, bool]:
        """(output line, tokens generated, whether it went well)."""
        request = parse(line)
        reply = await self._reply(request)
        return response_line(id_, request.custom_id, reply), num_completion_tokens(reply.content), reply.is_success

    async def _reply(self, request: BatchRequest) -> httpx.Response:
        client = await self._connected()
        last: httpx.Response | None = None

        async def ask() -> httpx.Response:
            nonlocal last
            last = await _patiently(client, request)
            if last.status_code == 500:
                raise EngineDeadError("The engine failed on this request.")
            return last

        try:
            return await self._host.run(ask)
        except EngineDeadError:
            assert last is not None
            return last

    async def _connected(self) -> httpx.AsyncClient:
        door = await self._host.door()
        if self._client is None:
            app = build_app(door, HttpConfig(max_body_bytes=_MAX_BODY_BYTES))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            self._client = httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)
        return self._client


async def _patiently(client: httpx.AsyncClient, request: BatchRequest) -> httpx.Response:
    """Asks until the engine's queue has room: a batch has time."""
    while True:
        reply = await client.post(request.url, content=orjson.dumps(request.body))
        if reply.status_code != 429:
            return reply
        await asyncio.sleep(float(reply.headers.get("retry-after", "1")))
