"""A door straight into an engine of this process: the whole path but Ray. What ``serving/feed`` does, in miniature."""

import asyncio
from collections.abc import Sequence
from typing import Any

from nanoserve.core.outputs import RequestOutput, StepStats
from nanoserve.core.request import GenerateRequest
from nanoserve.engine.async_engine import AsyncEngine
from nanoserve.engine.core import EngineCore, EngineUpdate
from nanoserve.serving.door import Health, ServedModel


def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output that says what several in a row said."""
    last = outputs[-1]
    return RequestOutput(
        request_id=last.request_id,
        new_token_ids=tuple(token_id for output in outputs for token_id in output.new_token_ids),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=tuple(entry for output in outputs for entry in output.prompt_logprobs),
        num_cached_tokens=last.num_cached_tokens,
        error=last.error,
        pooled=last.pooled,
    )


class LocalStream:
    """``min_outputs``: how many outputs of the engine at least are handed over at once, for tests of grouping."""

    def __init__(self, door: "LocalDoor", request_id: str) -> None:
        self._door = door
        self._request_id = request_id
        self._pending: list[RequestOutput] = []
        self._news = asyncio.Event()
        self._finished = False

    def put(self, output: RequestOutput) -> None:
        self._pending.append(output)
        self._finished = output.finish_reason is not None
        if self._finished or len(self._pending) >= self._door.min_outputs:
            self._news.set()

    async def next(self) -> RequestOutput:
        await self._news.wait()
        self._news.clear()
        outputs, self._pending = self._pending, []
        return merged(outputs)

    def close(self) -> None:
        self._door.forget(self._request_id, abort=not self._finished)


class LocalDoor:
    """Owns the engine's thread. Made and used on one event loop."""

    def __init__(self, core: EngineCore, served: Sequence[ServedModel], **engine: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._served = served
        self._streams: dict[str, LocalStream] = {}
        self.engine = AsyncEngine(core, self._deliver, **engine)
        self.stats = StepStats()
        self.min_outputs = 1

    def _deliver(self, update: EngineUpdate) -> None:
        self._loop.call_soon_threadsafe(self._hand_out, update)

    def _hand_out(self, update: EngineUpdate) -> None:
        self.stats = update.stats
        for output in update.outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)

    async def open(self, request: GenerateRequest, model: str) -> LocalStream:
        stream = LocalStream(self, request.request_id)
        assert request.request_id not in self._streams, "request ids are unique"
        self._streams[request.request_id] = stream
        try:
            self.engine.submit(request)
        except BaseException:
            self.forget(request.request_id, abort=False)
            raise
        return stream

    def forget(self, request_id: str, *, abort: bool) -> None:
        if self._streams.pop(request_id, None) is not None and abort:
            self.engine.abort(request_id)

    def models(self) -> Sequence[ServedModel]:
        return self._served

    async def health(self) -> Health:
        health = self.engine.health()
        fine = health.state in ("idle", "running")
        return Health(healthy=fine, ready=fine, reason=health.reason)

    async def metrics(self) -> bytes:
        return f"running {self.stats.num_running}\n".encode()
