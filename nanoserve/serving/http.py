"""The HTTP app: every route, over a ``Door``. Knows OpenAI's protocol and no transport.

What holds for all routes: errors are ``{"error": {...}}``; every reply carries ``x-request-id``; with API keys set,
everything but ``OPEN_PATHS`` and OPTIONS asks for one; a trailing slash changes nothing.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, TypeVar

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response

from nanoserve.core.errors import InvalidRequestError, ModelNotFoundError, NanoserveError, UnavailableError
from nanoserve.protocol import responses
from nanoserve.protocol.anthropic import CountTokensRequest, MessagesRequest
from nanoserve.protocol.body import parse_body
from nanoserve.protocol.errors import RequestNotFoundError, ResponseNotFoundError, error_json
from nanoserve.protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestBody,
    SamplingBody,
    TokenizeRequest,
)
from nanoserve.protocol.openai_responses import ResponsesRequest
from nanoserve.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from nanoserve.serving import chat_route, completions_route, messages_route, pooling_route, responses_route
from nanoserve.serving.answer import OPENAI_STYLE, EventAnswer, EventWriter, JsonAnswer, StreamStyle
from nanoserve.serving.backstage import Backstage
from nanoserve.serving.body import read_body
from nanoserve.serving.callers import TIMEOUT_HEADER, Callers, CallersDoor, callers_of, deadline
from nanoserve.serving.config import ApiKey
from nanoserve.serving.door import Door, Health, ServedModel
from nanoserve.serving.front import Cors, Faults, RequestIds, on_http_exception, on_nanoserve_error
from nanoserve.serving.openapi import document
from nanoserve.serving.response_store import ResponseStore, StoredResponse
from nanoserve.text.from_messages import chat_of

Body = TypeVar("Body", bound=RequestBody)
_HEALTH_TIMEOUT_S = 5.0
_LARGE_BODY_BYTES = 8 * 1024
# Fields that ask for a grammar, whose check may take seconds.
_FORMS = {
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools",
    "text", "output_config", "output_format",
}  # fmt: skip
SESSION_HEADER = "x-session-id"
_LIMIT_HEADERS = [f"x-ratelimit-{w}-{of}" for of in ("requests", "tokens") for w in ("limit", "remaining", "reset")]


class Work(Protocol):
    """A request of one route, judged and ready to be answered in one of two ways."""

    async def reply(self) -> bytes: ...

    async def stream(self, writer: EventWriter) -> None: ...


Prepare = Callable[[Door, ServedModel, Body, str], Work]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """What an operator may set about the front door.

    ``cors_origins`` empty: no CORS headers, browsers of other origins are refused; ``("*",)``: all are let in.
    ``returns_request_id`` False: Ray Serve adds it.
    ``num_routers`` apps share the keys' quotas. ``max_request_s``: the most time that a request may take.
    ``ping_s``: after so much silence a stream sends a comment; ``stall_s``: after so long a client that does not read
    is dropped. ``max_stored_responses`` and ``max_stored_bytes``: how many of ``/v1/responses`` are remembered for
    ``previous_response_id``.
    """

    api_keys: tuple[str | ApiKey, ...] = ()
    returns_request_id: bool = True
    num_routers: int = 1
    max_request_s: float | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_s: float = 60.0
    ping_s: float = 10.0
    stall_s: float = 60.0
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * 1024 * 1024


def build_app(door: Door, config: HttpConfig, backstage: Backstage | None = None) -> FastAPI:
    """The app. Its own state are quotas and the responses it remembers."""
    backstage = Backstage() if backstage is None else backstage
    app = FastAPI(
        title="nanoserve",
        openapi_url=None,
        redirect_slashes=False,
        middleware=_middleware(config, backstage),
        exception_handlers={NanoserveError: on_nanoserve_error, HTTPException: on_http_exception},
    )
    routes = Routes(door, config, backstage)
    for path, methods, handler in routes.table():
        app.add_api_route(path, handler, methods=methods, response_model=None)
    return app


def _middleware(config: HttpConfig, backstage: Backstage) -> list[Middleware]:
    """Outermost first. CORS stands outside the key, so that a browser may read a 401."""
    cors = Middleware(
        Cors,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", *_LIMIT_HEADERS],
    )
    callers = callers_of(config.api_keys, config.num_routers)
    doors = [Middleware(Faults), Middleware(Callers, callers=callers, usage=backstage.usage)]
    traces = [] if backstage.trace is None else [Middleware(backstage.trace)]
    return [
        Middleware(RequestIds, returned=config.returns_request_id),
        *traces,
        *([cors] if config.cors_origins else []),
        *doors,
    ]


class Routes:
    """The handlers, and the table that says where each of them answers."""

    def __init__(self, door: Door, config: HttpConfig, backstage: Backstage) -> None:
        self._door = door
        self._backstage = backstage
        self._config = config
        self._stored = ResponseStore(max_count=config.max_stored_responses, max_bytes=config.max_stored_bytes)
        self._version = _version()
        self._fingerprint = f"nanoserve-{self._version}"

    def table(self) -> list[tuple[str, list[str], Callable[..., Any]]]:
        return [
            ("/", ["GET", "HEAD"], self.index),
            ("/health", ["GET", "HEAD"], self.health),
            ("/ready", ["GET", "HEAD"], self.ready),
            ("/metrics", ["GET"], self.metrics),
            ("/openapi.json", ["GET"], self.openapi),
            ("/v1/models", ["GET"], self.models),
            ("/v1/models/{model_id:path}", ["GET"], self.one_model),
            ("/v1/chat/completions", ["POST"], self.chat),
            ("/v1/completions", ["POST"], self.completions),
            ("/v1/responses", ["POST"], self.responses),
            ("/v1/responses/{response_id}", ["GET"], self.one_response),
            ("/v1/responses/{response_id}", ["DELETE"], self.forget_response),
            ("/v1/requests/{request_id}/timeline", ["GET"], self.timeline),
            ("/v1/responses/{response_id}/input_items", ["GET"], self.input_items),
            ("/v1/messages", ["POST"], self.messages),
            ("/v1/messages/count_tokens", ["POST"], self.count_tokens),
            ("/v1/embeddings", ["POST"], self.embeddings),
            *[(path, ["POST"], self.rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")],
            *[(path, ["POST"], self.score) for path in ("/v1/score", "/score")],
            ("/tokenize", ["POST"], self.tokenize),
            ("/detokenize", ["POST"], self.detokenize),
        ]

    async def index(self) -> Response:
        names = [model.name for model in self._door.models()]
        return _json({"name": "nanoserve", "version": self._version, "models": names, "api": "/v1"})

    async def openapi(self) -> Response:
        """This document."""
        return _json(document(self.table(), self._version))

    async def health(self) -> Response:
        """200 while an engine makes progress or is idle, else 503 with the reason."""
        health = await self._health()
        return _state(health, fine=health.healthy, word="healthy")

    async def ready(self) -> Response:
        """200 while new requests are taken: what a load balancer asks."""
        health = await self._health()
        return _state(health, fine=health.ready, word="ready")

    async def _health(self) -> Health:
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                return await self._door.health()
        except TimeoutError:
            reason = f"The engines did not say how they are within {_HEALTH_TIMEOUT_S:g} s."
            return Health(healthy=False, ready=False, reason=reason)

    async def metrics(self) -> Response:
        return Response(await self._door.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> Response:
        return _json(responses.model_list([_card(model) for model in self._door.models()]))

    async def one_model(self, model_id: str) -> Response:
        return _json(_card(self._find(model_id)))

    async def chat(self, request: Request) -> Response:
        body = await self._parse(request, ChatCompletionRequest)
        work = await self._prepare(request, chat_route.prepare, body)
        return self._answer(work, stream=bool(body.stream))

    async def completions(self, request: Request) -> Response:
        body = await self._parse(request, CompletionRequest)
        work = await self._prepare(request, completions_route.prepare, body)
        return self._answer(work, stream=bool(body.stream))

    async def responses(self, request: Request) -> Response:
        body = await self._parse(request, ResponsesRequest)
        model, before = self._find(body.model), body.previous_response_id
        history = [] if before is None else self._response(before).messages
        body = responses_route.resolved(body, self._stored)
        work = await self._beside_loop(
            request, responses_route.prepare, model, body, self._door_for(request, body), history, self._stored.put
        )
        return self._answer(work, stream=bool(body.stream), style=work.style)

    async def one_response(self, request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise InvalidRequestError(
                "`stream`: only responses in the background could be; read it whole.", param="stream"
            )
        return Response(self._response(response_id).body, media_type="application/json")

    async def forget_response(self, response_id: str) -> Response:
        self._response(response_id)
        self._stored.pop(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request, response_id: str) -> Response:
        """The items of the response's own input; those of the responses before it are listed with these."""
        items = self._response(response_id).input_items
        return _json(responses_route.page(items, request.query_params))

    def _response(self, response_id: str) -> StoredResponse:
        found = self._stored.get(response_id)
        if found is None:
            raise ResponseNotFoundError(response_id)
        return found

    async def timeline(self, request_id: str, request: Request) -> Response:
        """What happened to a request and why, by the id of its response or its `x-request-id`."""
        found = await self._backstage.find_timeline(request.scope["caller"].tenant, request_id)
        if found is None:
            raise RequestNotFoundError(request_id)
        return _json(found)

    async def messages(self, request: Request) -> Response:
        body = await self._parse(request, MessagesRequest)
        work = await self._prepare(request, messages_route.prepare, body)
        return self._answer(work, stream=bool(body.stream), style=messages_route.STYLE)

    async def count_tokens(self, request: Request) -> Response:
        body = await self._parse(request, CountTokensRequest)
        model = self._find(body.model)
        num_tokens = await asyncio.to_thread(lambda: model.preprocessor.count(chat_of(body)))
        return _json({"input_tokens": num_tokens})

    def _answer(self, work: Work, *, stream: bool, style: StreamStyle = OPENAI_STYLE) -> Response:
        if not stream:
            return JsonAnswer(work.reply)
        return EventAnswer(work.stream, idle_s=self._config.ping_s, stall_s=self._config.stall_s, style=style)

    async def embeddings(self, request: Request) -> Response:
        body = await self._parse(request, EmbeddingRequest)
        door, model = self._door_for(request, body), self._find(body.model)
        return JsonAnswer((await asyncio.to_thread(pooling_route.embeddings, door, model, body)).reply)

    async def rerank(self, request: Request) -> Response:
        body = await self._parse(request, RerankRequest)
        model = self._find(body.model, required=False)
        door = self._door_for(request, body)
        return JsonAnswer((await asyncio.to_thread(pooling_route.rerank, door, model, body)).reply)

    async def score(self, request: Request) -> Response:
        body = await self._parse(request, ScoreRequest)
        model = self._find(body.model, required=False)
        door = self._door_for(request, body)
        return JsonAnswer((await asyncio.to_thread(pooling_route.score, door, model, body)).reply)

    async def tokenize(self, request: Request) -> Response:
        body = await self._parse(request, TokenizeRequest)
        model = self._find(body.model, required=False)
        ids = await asyncio.to_thread(model.preprocessor.tokenize, body)
        texts = (
            [model.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
            if body.return_token_strs
            else None
        )
        reply = {"count": len(ids), "max_model_len": model.limits.max_model_len, "tokens": ids, "token_strs": texts}
        return _json(reply)

    async def detokenize(self, request: Request) -> Response:
        body = await self._parse(request, DetokenizeRequest)
        model = self._find(body.model, required=False)
        return _json({"prompt": await asyncio.to_thread(model.preprocessor.detokenize, body)})

    async def _parse(self, request: Request, body_type: type[Body]) -> Body:
        raw = await read_body(request, max_bytes=self._config.max_body_bytes, timeout_s=self._config.body_timeout_s)
        request.state.is_large = len(raw) > _LARGE_BODY_BYTES
        body: Body = await self._beside_loop(request, parse_body, raw, body_type)
        request.state.is_large |= not _FORMS.isdisjoint(body.model_fields_set)
        if (session_id := request.headers.get(SESSION_HEADER)) and isinstance(body, SamplingBody):
            return body.model_copy(update={"session_id": session_id})
        return body

    async def _prepare(self, request: Request, prepare: Prepare[Body], body: Body) -> Work:
        model = self._find(body.model)
        door = self._door_for(request, body)
        work: Work = await self._beside_loop(request, prepare, door, model, body, self._fingerprint)
        return work

    def _door_for(self, request: Request, body: RequestBody) -> CallersDoor:
        """The door for one request of its caller, with the request's deadline."""
        asked_s = getattr(body, "timeout_s", None)
        if asked_s is None:
            asked_s = request.headers.get(TIMEOUT_HEADER)
        deadline_s = deadline(asked_s, self._config.max_request_s, time.time())
        return CallersDoor(self._door, request.scope, self._backstage, deadline_s)

    async def _beside_loop(self, request: Request, work: Callable[..., Any], *args: Any) -> Any:
        """Parsing and tokenizing take milliseconds a page of text: a long one must not hold up the other streams."""
        return await asyncio.to_thread(work, *args) if request.state.is_large else work(*args)

    def _find(self, name: str | None, *, required: bool = True) -> ServedModel:
        """The model of this name; the only one when the route does not need a name."""
        models = self._door.models()
        if not models:
            raise UnavailableError("No model is loaded yet.", code="no_model")
        if name is None and (required or len(models) > 1):
            raise InvalidRequestError(f"`model` is required. Served here: {_names(models)}.", param="model")
        found = [model for model in models if name is None or model.name == name]
        if not found:
            message = f"The model {(name or '')[:200]!r} is not served here. Served: {_names(models)}."
            raise ModelNotFoundError(message, param="model", code="model_not_found")
        return found[0]


def _names(models: Sequence[ServedModel]) -> str:
    return ", ".join(model.name for model in models)[:1000]


def _card(model: ServedModel) -> responses.Json:
    return responses.model_object(model.name, model.created, model.limits.max_model_len)


def _state(health: Health, *, fine: bool, word: str) -> Response:
    """The details beside the verdict, which is an error object when it is bad."""
    if fine:
        return _json({"status": word} | dict(health.details))
    reason = health.reason or f"The service is not {word}."
    error = orjson.loads(error_json(reason, "service_unavailable_error", code=f"not_{word}"))
    body = orjson.dumps(error | {"status": f"not {word}"} | dict(health.details))
    return Response(body, 503, {"retry-after": "1"}, "application/json")


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _version() -> str:
    try:
        return version("nanoserve")
    except PackageNotFoundError:
        return "source"
