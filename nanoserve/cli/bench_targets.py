"""What ``nanoserve bench`` measures: a service over HTTP, or an engine in this process."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import httpx

from nanoserve.cli.conversation import raise_for
from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import NanoserveError, UnavailableError
from nanoserve.core.outputs import RequestOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.async_engine import AsyncEngine
from nanoserve.engine.core import EngineCore, EngineUpdate
from nanoserve.observe.workloads import Item


class HttpTarget:
    """Streams of ``/v1/completions`` with token ids. Its own ``cache_salt`` keeps an earlier run's prompts apart."""

    def __init__(self, base_url: httpx.URL, headers: Mapping[str, str], model: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600, limits=limits)
        self._fields = {
            "model": model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,  # an event for each token, also where it completes no character
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "cache_salt": uuid.uuid4().hex,
        }

    async def answer(self, item: Item) -> AsyncIterator[int]:
        body = self._fields | {"prompt": list(item.prompt_token_ids), "max_tokens": item.num_output_tokens}
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise_for(reply.status_code, await reply.aread())
                async with aclosing(_counts(reply)) as counts:
                    async for count in counts:
                        yield count
        except httpx.HTTPError as error:
            raise UnavailableError(f"The connection broke: {type(error).__name__} {error}".rstrip() + ".") from None

    async def close(self) -> None:
        await self._client.aclose()


async def _counts(reply: httpx.Response) -> AsyncGenerator[int, None]:
    """New tokens of each event: by the usage it carries, or one where a service tells none on the way."""
    num_known = 0
    async for line in reply.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise UnavailableError(str(event["error"].get("message", "The stream ended with an error.")))
        told = (event.get("usage") or {}).get("completion_tokens")
        num_now = num_known + bool(event.get("choices")) if told is None else told
        if num_now > num_known:
            yield num_now - num_known
        num_known = max(num_now, num_known)


class EngineTarget:
    """An engine on its own thread: what a replica is, without Ray and HTTP."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError, CheckpointError: the model cannot be loaded with these settings, those of ``EngineArgs``.
        """
        from nanoserve.model.build import build

        loaded = build(EngineArgs(**settings))
        self.info = loaded.info
        self._loop = asyncio.get_running_loop()
        self._engine = AsyncEngine(EngineCore(loaded.runner, loaded.scheduler), self._deliver)
        self._streams: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._num_asked = 0
        self._engine.start()

    async def answer(self, item: Item) -> AsyncIterator[int]:
        self._num_asked += 1
        request_id = f"bench-{self._num_asked}"
        stream = self._streams[request_id] = asyncio.Queue()
        sampling = SamplingParams(temperature=0, max_tokens=item.num_output_tokens, seed=0)
        prompt = item.prompt_token_ids
        try:
            self._engine.submit(
                GenerateRequest(
                    request_id=request_id, prompt_token_ids=prompt, sampling=sampling, arrival_s=time.time()
                )
            )
            while True:
                output = await stream.get()
                if output.error is not None:
                    raise NanoserveError(output.error[1])
                yield len(output.new_token_ids)
                if output.finish_reason is not None:
                    return
        finally:
            del self._streams[request_id]

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.stop)

    def _deliver(self, update: EngineUpdate) -> None:
        if update.outputs and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_out, update.outputs)

    def _hand_out(self, outputs: tuple[RequestOutput, ...]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put_nowait(output)
