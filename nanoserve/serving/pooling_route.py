"""``POST /v1/embeddings``, ``/v1/rerank`` and ``/v1/score``: many short requests behind one, collected into one reply.

Invariant: an engine sees at most ``WINDOW`` inputs of one body at a time, however many it brings.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

import orjson

from nanoserve.core.errors import InvalidRequestError, QueueFullError
from nanoserve.core.outputs import FinishReason
from nanoserve.protocol import pooling as wire
from nanoserve.protocol.errors import OutputError
from nanoserve.serving.door import Door, RequestStream, ServedModel
from nanoserve.serving.generation import together
from nanoserve.text.pooling import PoolingBatch, PoolingPreprocessor, relevance

WINDOW = 128
_MAX_WAIT_S = 60.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """A judged request to ``/v1/embeddings``."""

    run: "Run"
    model: str
    body: wire.EmbeddingRequest

    async def reply(self) -> bytes:
        format_ = self.body.encoding_format
        data = await self.run.results(lambda index, pooled: wire.embedding(index, pooled, format_))
        batch = self.run.batch
        reply = wire.embedding_list(batch.request_id, int(batch.arrival_s), self.model, data, batch.num_tokens)
        return orjson.dumps(reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerank:
    """A judged request to ``/v1/rerank``. ``documents``: what the reply shows of them, None for nothing."""

    run: "Run"
    model: str
    body: wire.RerankRequest
    documents: list[str] | None

    async def reply(self) -> bytes:
        scores = await self.run.results(lambda _, pooled: relevance(pooled))
        batch = self.run.batch
        top_n = self.body.top_n or 0
        return orjson.dumps(
            wire.rerank_results(
                batch.request_id, self.model, scores, batch.num_tokens, top_n=top_n, documents=self.documents
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A judged request to ``/v1/score``."""

    run: "Run"
    model: str

    async def reply(self) -> bytes:
        scores = await self.run.results(lambda _, pooled: relevance(pooled))
        batch = self.run.batch
        return orjson.dumps(
            wire.score_list(batch.request_id, int(batch.arrival_s), self.model, scores, batch.num_tokens)
        )


# Each raises InvalidRequestError for what can never be answered; nothing was asked of an engine yet.


def embeddings(door: Door, model: ServedModel, body: wire.EmbeddingRequest) -> Embeddings:
    batch = _pooling(model).embeddings(body, f"embd-{uuid4().hex}")
    return Embeddings(run=Run(door, batch, model.name), model=model.name, body=body)


def rerank(door: Door, model: ServedModel, body: wire.RerankRequest) -> Rerank:
    batch, documents = _pooling(model).rerank(body, f"rerank-{uuid4().hex}")
    shown = None if body.return_documents is False else documents
    return Rerank(run=Run(door, batch, model.name), model=model.name, body=body, documents=shown)


def score(door: Door, model: ServedModel, body: wire.ScoreRequest) -> Scores:
    batch = _pooling(model).score(body, f"score-{uuid4().hex}")
    return Scores(run=Run(door, batch, model.name), model=model.name)


def _pooling(model: ServedModel) -> PoolingPreprocessor:
    if model.pooling is None:
        raise InvalidRequestError("This model makes no embeddings and judges no pairs of texts.", param="model")
    return model.pooling


@dataclass(slots=True)
class Run:
    """A batch on its way through the engines."""

    door: Door
    batch: PoolingBatch
    model: str
    give_up_s: float = 0.0

    async def results(self, read: Callable[[int, bytes], Result]) -> list[Result]:
        """``read(index, pooled)`` of every input, in order; the first failure ends them all and is raised."""
        found: dict[int, Result] = {}
        left = iter(range(len(self.batch.prompts)))

        async def work() -> None:
            for index in left:
                found[index] = read(index, await self._pooled(index))

        await together([work() for _ in range(min(WINDOW, len(self.batch.prompts)))])
        return [found[index] for index in range(len(found))]

    async def _pooled(self, index: int) -> bytes:
        stream = await self._opened(index)
        try:
            output = await stream.next()
            while output.finish_reason is None:
                output = await stream.next()
        finally:
            stream.close()
        if output.error is not None:
            raise OutputError(*output.error)
        if output.finish_reason is FinishReason.ABORT:
            raise OutputError("service_unavailable_error", "The server stopped this request before it was finished.")
        self.give_up_s = time.monotonic() + _MAX_WAIT_S
        return output.pooled

    async def _opened(self, index: int) -> RequestStream:
        """A full queue refuses a body as long as nothing of it is done; after that, its rest waits for room."""
        while True:
            try:
                return await self.door.open(self.batch.request(index), self.model)
            except QueueFullError as error:
                if time.monotonic() + error.retry_after_s > self.give_up_s:
                    raise
                await asyncio.sleep(error.retry_after_s)
