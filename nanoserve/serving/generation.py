"""One HTTP request's choices, from opening their streams to giving them back: the same for every route.

Invariant: whatever ends an answer (its last token, a fault, a client that left), every stream it opened is closed.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from nanoserve.core.errors import NanoserveError
from nanoserve.core.request import GenerateRequest
from nanoserve.protocol import responses
from nanoserve.protocol.errors import OutputError
from nanoserve.protocol.openai import GenerationBody
from nanoserve.protocol.sse import DONE, members, usage_event
from nanoserve.serving.answer import EventWriter
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
        streams[request.request_id] = await door.open(request, model.name)

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
        self._num_reasoning_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}

    def add(self, choice: Choice, delta: Delta) -> None:
        self._num_completion_tokens[choice.index] = delta.num_completion_tokens
        self._num_reasoning_tokens[choice.index] = delta.num_reasoning_tokens
        if choice.request is choice.prompt.choices[0]:
            self._num_cached_tokens[choice.prompt_index] = delta.num_cached_tokens

    def usage(self) -> responses.Json:
        return responses.usage(
            self._num_prompt_tokens,
            sum(self._num_completion_tokens.values()),
            cached_tokens=sum(self._num_cached_tokens.values()),
            reasoning_tokens=sum(self._num_reasoning_tokens.values()),
        )


class Reader(Protocol):
    """Collects one choice's deltas for a plain reply."""

    def add(self, delta: Delta) -> None: ...


class Renderer(Protocol):
    """Writes one choice's deltas as events; ``usage`` is the member that each chunk ends with."""

    def render(self, delta: Delta, usage: bytes) -> bytes: ...


AnyReader = TypeVar("AnyReader", bound=Reader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request that was judged and may be run, once. Both ways to run it go over the same deltas."""

    door: Door
    model: ServedModel
    body: GenerationBody
    prompts: Sequence[PreparedRequest]

    async def collect(self, reader_of: Callable[[Choice], AnyReader]) -> tuple[list[AnyReader], responses.Json]:
        """Runs to the end: each choice's reader, and the usage."""
        tally = Tally(self.prompts)

        async def read(choice: Choice, reader: AnyReader) -> None:
            async for delta in choice.deltas():
                tally.add(choice, delta)
                reader.add(delta)

        async with opened(self.door, self.model, self.prompts) as choices:
            readers = [reader_of(choice) for choice in choices]
            await together([read(choice, reader) for choice, reader in zip(choices, readers, strict=True)])
        return readers, tally.usage()

    @asynccontextmanager
    async def choice(self) -> AsyncIterator[Choice]:
        """The only choice of a request that has one."""
        async with opened(self.door, self.model, self.prompts) as (choice,):
            yield choice

    async def write(
        self, writer: EventWriter, envelope: responses.Json, renderer_of: Callable[[Choice], Renderer]
    ) -> None:
        """Runs as events: the choices' chunks as they come, the usage where it was asked for, ``[DONE]``."""
        tally = Tally(self.prompts)
        usage_member = self._usage_member(tally)

        async def write_one(choice: Choice) -> None:
            renderer = renderer_of(choice)
            async for delta in choice.deltas():
                tally.add(choice, delta)
                if events := renderer.render(delta, usage_member()):
                    await writer.write(events)

        async with opened(self.door, self.model, self.prompts) as choices:
            await together([write_one(choice) for choice in choices])
        last = usage_event(envelope, tally.usage()) if usage_member() else b""
        await writer.write(last + DONE, last=True)

    def _usage_member(self, tally: Tally) -> Callable[[], bytes]:
        """What chunks say of the usage: nothing; null, since it comes last; or what it is now."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return lambda: b""
        if not options.continuous_usage_stats:
            return lambda: b',"usage":null'
        return lambda: members(usage=tally.usage())
