"""One HTTP request's choices, from opening their streams to giving them back: the same for every route.

Invariant: whatever ends an answer (its last token, a fault, a client that left), every stream it opened is closed.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from nanoserve.core.errors import NanoserveError
from nanoserve.core.request import GenerateRequest
from nanoserve.protocol import responses
from nanoserve.protocol.errors import OutputError
from nanoserve.protocol.openai import GenerationBody
from nanoserve.serving.door import Door, RequestStream, ServedModel
from nanoserve.text.postprocess import ChoiceProcessor, Delta
from nanoserve.text.preprocess import PreparedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice being generated. ``index`` counts over all prompts; ``prompt_index`` says which prompt it answers."""

    index: int
    prompt_index: int
    prompt: PreparedRequest
    request: GenerateRequest
    processor: ChoiceProcessor
    stream: RequestStream

    async def deltas(self) -> AsyncIterator[Delta]:
        """The answer's words until its finish reason, which is on the last one.

        Raises:
            OutputError: the engine gave the request up.
        """
        finish = None
        while finish is None:
            delta = self.processor.feed(await self.stream.next())
            finish = delta.finish_reason
            if delta.error is not None:
                raise OutputError(*delta.error)
            if finish == "abort":
                raise OutputError(
                    "service_unavailable_error", "The server stopped this request before it was finished."
                )
            yield delta


@asynccontextmanager
async def opened(door: Door, model: ServedModel, prompts: Sequence[PreparedRequest]) -> AsyncIterator[list[Choice]]:
    """Opens a stream for each choice of each prompt, all or none, and closes them all in the end."""
    streams: dict[str, RequestStream] = {}

    async def open_one(request: GenerateRequest) -> None:
        streams[request.request_id] = await door.open(request)

    try:
        await together([open_one(request) for prompt in prompts for request in prompt.choices])
        yield _choices(model, prompts, streams)
    finally:
        for stream in streams.values():
            stream.close()


def _choices(model: ServedModel, prompts: Sequence[PreparedRequest], streams: dict[str, RequestStream]) -> list[Choice]:
    index = itertools.count()
    return [
        Choice(
            index=next(index),
            prompt_index=prompt_index,
            prompt=prompt,
            request=request,
            processor=ChoiceProcessor(model.tokenizer, prompt.policy, request),
            stream=streams[request.request_id],
        )
        for prompt_index, prompt in enumerate(prompts)
        for request in prompt.choices
    ]


async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all; the first failure cancels the rest and is raised as it is. A single one runs without a task."""
    if len(works) == 1:
        return await works[0]
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """A failure meant for the client before any other."""
    known, rest = failures.split(NanoserveError)
    leaf: BaseException = known or rest or failures
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf


class Tally:
    """The token counts of one HTTP request while it grows. A prompt counts once, however many choices answer it."""

    def __init__(self, prompts: Sequence[PreparedRequest]) -> None:
        self._num_prompt_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
        self._num_completion_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}

    def add(self, choice: Choice, delta: Delta) -> None:
        self._num_completion_tokens[choice.index] = delta.num_completion_tokens
        if choice.request is choice.prompt.choices[0]:
            self._num_cached_tokens[choice.prompt_index] = delta.num_cached_tokens

    def usage(self) -> responses.Json:
        num_cached = sum(self._num_cached_tokens.values())
        return responses.usage(self._num_prompt_tokens, sum(self._num_completion_tokens.values()), num_cached)


UsageMode = Literal["none", "last", "every"]


def usage_mode(body: GenerationBody) -> UsageMode:
    """When a stream tells its usage: never, in a last chunk (null before it), or besides in every chunk."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return "none"
    return "every" if options.continuous_usage_stats else "last"


def usage_member(mode: UsageMode, tally: Tally) -> bytes:
    """The member that a chunk of this mode ends with."""
    if mode == "every":
        return b',"usage":' + orjson.dumps(tally.usage())
    return b',"usage":null' if mode == "last" else b""
