"""``/openapi.json``: made from the table of routes and the body models, so it says what is served and nothing else."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from nanoserve.protocol.anthropic import CountTokensRequest, MessagesRequest
from nanoserve.protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from nanoserve.protocol.openai_responses import ResponsesRequest
from nanoserve.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest

Json = dict[str, Any]

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RerankRequest),
    **dict.fromkeys(("/v1/score", "/score"), ScoreRequest),
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_QUERIES: Mapping[str, Mapping[str, Json]] = {
    "/v1/responses/{response_id}/input_items": {
        "after": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
    },
}
_STREAMED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_REFUSALS = {
    "400": "The request can never work.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such route, model or response.",
    "405": "The path exists, but not for this method.",
    "408": "The body took too long to come.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "A queue is full; try again after the time in `retry-after`.",
    "500": "The server failed.",
    "503": "No engine can serve right now.",
    "504": "The request's deadline passed.",
}
_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")


def document(routes: Sequence[tuple[str, list[str], Callable[..., Any]]], version: str) -> Json:
    """The OpenAPI 3.1 document of the routes, each a path, its methods and its handler."""
    definitions: Json = {"Error": _ERROR}
    paths: dict[str, Json] = {}
    for path, methods, handler in routes:
        item = paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})
        for method in methods:
            item[method.lower()] = _operation(path, method, handler, definitions)
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanoserve", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _operation(path: str, method: str, handler: Callable[..., Any], definitions: Json) -> Json:
    words = re.sub(r"\W+", "_", f"{method.lower()}_{path}").strip("_")
    operation: Json = {"operationId": words, "responses": _responses(path)}
    if handler.__doc__:
        operation["summary"] = handler.__doc__.strip().split("\n")[0]
    if names := _PARAMETER.findall(path):
        text = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
        queries = _QUERIES.get(path, {}).items()
        operation["parameters"] += [{"name": name, "in": "query", "schema": schema} for name, schema in queries]
    if method == "POST":
        schema = _schema(BODIES[path], definitions) if path in BODIES else {"type": "object"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _schema(body: type[BaseModel], definitions: Json) -> Json:
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions |= schema.pop("$defs", {})
    definitions[body.__name__] = schema
    return {"$ref": f"#/components/schemas/{body.__name__}"}


def _responses(path: str) -> Json:
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {status: {"description": text, "content": error} for status, text in _REFUSALS.items()}
    return {"200": {"description": "The answer.", "content": content}, **refusals}
