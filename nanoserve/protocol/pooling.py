"""Bodies and replies of the routes that generate nothing: OpenAI's embeddings, Jina's and Cohere's rerank,
vLLM's score.

Numbers arrive as an engine sends them: float32, little-endian, as bytes.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from pydantic import AliasChoices, Field

from nanoserve.protocol.openai import RequestBody
from nanoserve.protocol.responses import Json


class PoolingBody(RequestBody):
    """What these routes have in common. ``truncate_prompt_tokens``: -1 means as many as the model takes."""

    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    user: Any = None


class EmbeddingRequest(PoolingBody):
    """The body of ``POST /v1/embeddings``. ``input``: a text, token ids, or a list of either.

    ``prompt_name`` names one of the checkpoint's prompts, as in sentence-transformers.
    """

    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class RerankRequest(PoolingBody):
    """The body of ``POST /v1/rerank``. ``documents``: texts, or objects with a ``text``. ``top_n`` 0 means all."""

    query: str
    documents: list[Any]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreRequest(PoolingBody):
    """The body of ``POST /v1/score``: one text against one or several, or several in pairs."""

    text_1: str | list[Any] = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: str | list[Any] = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))


def embedding(index: int, pooled: bytes, encoding_format: str | None) -> orjson.Fragment:
    """One item of ``data``, rendered at once: two thousand of them in one go would hold up the other streams."""
    vector: object = np.frombuffer(pooled, "<f4").astype(np.float32, copy=False)
    if encoding_format == "base64":
        vector = base64.b64encode(pooled).decode()
    item = {"object": "embedding", "index": index, "embedding": vector}
    return orjson.Fragment(orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY))


def embedding_list(id_: str, created: int, model: str, data: Sequence[orjson.Fragment], num_tokens: int) -> Json:
    head = {"id": id_, "object": "list", "created": created, "model": model}
    return head | {"data": list(data), "usage": _usage(num_tokens)}


def score_list(id_: str, created: int, model: str, scores: Sequence[float], num_tokens: int) -> Json:
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    head = {"id": id_, "object": "list", "created": created, "model": model}
    return head | {"data": data, "usage": _usage(num_tokens)}


def rerank_results(
    id_: str, model: str, scores: Sequence[float], num_tokens: int, *, top_n: int, documents: Sequence[str] | None
) -> Json:
    """The best ``top_n`` (0: all), best first, equals in the order they came; with texts where ``documents`` is set."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[Json] = [{"index": index, "relevance_score": scores[index]} for index in order[: top_n or None]]
    if documents is not None:
        results = [result | {"document": {"text": documents[order[rank]]}} for rank, result in enumerate(results)]
    return {"id": id_, "model": model, "usage": _usage(num_tokens), "results": results}


def _usage(num_tokens: int) -> Json:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
