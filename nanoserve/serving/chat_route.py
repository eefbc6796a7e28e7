"""``POST /v1/chat/completions``: one prompt, ``n`` choices, as a reply or as events.

Reply and events are two ways to write the same deltas, so a joined stream equals the plain reply by construction.
"""

import time
import uuid
from dataclasses import dataclass, field

import orjson

from nanoserve.protocol import responses
from nanoserve.protocol.openai import ChatCompletionRequest
from nanoserve.protocol.sse import ChunkTemplate, members
from nanoserve.serving.answer import EventWriter
from nanoserve.serving.door import Door, ServedModel
from nanoserve.serving.generation import Choice, Generation
from nanoserve.text.logprobs import TokenText
from nanoserve.text.postprocess import Delta
from nanoserve.text.tools import ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One request to this route, ready to be answered."""

    generation: Generation
    body: ChatCompletionRequest
    id: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def _envelope(self, object_: str) -> responses.Json:
        return responses.envelope(object_, self.id, self.created, self.generation.model.name, self.fingerprint)

    async def reply(self) -> bytes:
        messages, usage = await self.generation.collect(lambda choice: Message(choice, self.body))
        reply = {"choices": [message.choice() for message in messages], "usage": usage}
        return orjson.dumps(self._envelope("chat.completion") | reply | messages[0].about_prompt())

    async def stream(self, writer: EventWriter) -> None:
        envelope = self._envelope("chat.completion.chunk")
        await self.generation.write(writer, envelope, lambda choice: Chunks(envelope, choice, self.body))


def prepare(door: Door, model: ServedModel, body: ChatCompletionRequest, fingerprint: str) -> Chat:
    """Judges the request; nothing was asked of an engine yet.

    Raises:
        InvalidRequestError: it can never be answered.
    """
    id_ = f"chatcmpl-{uuid.uuid4().hex}"
    prompts = [model.preprocessor.chat(body, id_)]
    generation = Generation(door=door, model=model, body=body, prompts=prompts)
    return Chat(generation=generation, body=body, id=id_, fingerprint=fingerprint)


@dataclass(slots=True)
class ToolCall:
    """A call that grows."""

    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)


class Message:
    """One choice of a plain reply: collects its deltas."""

    def __init__(self, choice: Choice, body: ChatCompletionRequest) -> None:
        self._choice = choice
        self._body = body
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._logprobs: list[TokenText] = []
        self._prompt_logprobs: list[TokenText] = []
        self._token_ids: list[int] = []
        self._last = Delta()

    def add(self, delta: Delta) -> None:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        self._token_ids += delta.new_token_ids
        self._last = delta
        for news in delta.tool_calls:
            call = self._calls.setdefault(news.index, ToolCall())
            call.id, call.name = call.id or news.id, call.name or news.name
            call.arguments.append(news.arguments)

    def choice(self) -> responses.Json:
        logprobs = responses.chat_logprobs(self._logprobs) if self._body.logprobs else None
        choice: responses.Json = {
            "index": self._choice.index,
            "message": self._message(),
            "logprobs": logprobs,
            "finish_reason": self._last.finish_reason,
            "stop_reason": self._last.stop_reason,
            "seed": self._choice.request.sampling.seed,
        }
        return choice | ({"token_ids": self._token_ids} if self._body.return_token_ids else {})

    def _message(self) -> responses.Json:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        silent = not content and (reasoning or self._calls)
        message: responses.Json = {"role": "assistant", "content": None if silent else content, "refusal": None}
        if reasoning:
            message |= responses.reasoning_member(reasoning)
        if self._calls:
            calls = [self._calls[index] for index in sorted(self._calls)]
            message["tool_calls"] = [responses.tool_call(c.id, c.name, "".join(c.arguments)) for c in calls]
        return message

    def about_prompt(self) -> responses.Json:
        """What vLLM tells about the prompt when it is asked to, beside the choices."""
        about: responses.Json = {}
        if self._body.prompt_logprobs is not None:
            about["prompt_logprobs"] = responses.prompt_logprobs(self._prompt_logprobs)
        if self._body.return_token_ids:
            about["prompt_token_ids"] = list(self._choice.prompt.prompt_token_ids)
        return about


class Chunks:
    """One choice of a stream: writes each delta as events, role first, finish reason last and alone."""

    def __init__(self, envelope: responses.Json, choice: Choice, body: ChatCompletionRequest) -> None:
        self._template = ChunkTemplate(envelope, index=choice.index, member="delta")
        self._choice = choice
        self._body = body
        self._has_logprobs = bool(body.logprobs)
        self._started = False

    def render(self, delta: Delta, usage: bytes) -> bytes:
        """The events of one delta, nothing when it has nothing to say. ``usage``: the member each chunk ends with."""
        if self._started and delta.content and not self._is_rich(delta):
            return self._template.render(b'{"content":%b}' % orjson.dumps(delta.content), top=usage)
        events = [] if self._started else [self._start(delta, usage)]
        self._started = True
        logprobs, extra = self._per_token(delta)
        for value in self._values(delta, forced=logprobs != b"null" or extra != b""):
            events.append(self._template.render(value, logprobs=logprobs, extra=extra, top=usage))
            logprobs, extra = b"null", b""
        if delta.finish_reason is not None:
            events.append(self._finish(delta, usage))
        return b"".join(events)

    def _is_rich(self, delta: Delta) -> bool:
        """Whether a delta says more than a piece of content."""
        asked = self._has_logprobs or self._body.return_token_ids
        return bool(asked or delta.reasoning or delta.tool_calls or delta.finish_reason)

    def _start(self, delta: Delta, usage: bytes) -> bytes:
        about: responses.Json = {}
        if self._body.return_token_ids:
            about["prompt_token_ids"] = list(self._choice.prompt.prompt_token_ids)
        if self._body.prompt_logprobs is not None:
            about["prompt_logprobs"] = responses.prompt_logprobs(delta.prompt_logprobs)
        return self._template.render(b'{"role":"assistant","content":""}', top=usage + members(**about))

    def _per_token(self, delta: Delta) -> tuple[bytes, bytes]:
        """What goes with the first chunk of a delta, whatever its words are: logprobs and token ids."""
        has_logprobs = self._has_logprobs and delta.logprobs
        logprobs = orjson.dumps(responses.chat_logprobs(delta.logprobs)) if has_logprobs else b"null"
        has_ids = self._body.return_token_ids and delta.new_token_ids
        return logprobs, members(token_ids=delta.new_token_ids) if has_ids else b""

    def _values(self, delta: Delta, *, forced: bool) -> list[bytes]:
        """The ``delta`` members to send, each in a chunk of its own: thoughts, words, calls."""
        values: list[responses.Json] = []
        if delta.reasoning:
            values.append(responses.reasoning_member(delta.reasoning))
        if delta.content:
            values.append({"content": delta.content})
        values += [{"tool_calls": [_call(news)]} for news in delta.tool_calls]
        if forced and not values:
            values.append({"content": ""})
        return [orjson.dumps(value) for value in values]

    def _finish(self, delta: Delta, usage: bytes) -> bytes:
        extra = members(stop_reason=delta.stop_reason, seed=self._choice.request.sampling.seed)
        return self._template.render(b"{}", finish=orjson.dumps(delta.finish_reason), extra=extra, top=usage)


def _call(news: ToolCallDelta) -> responses.Json:
    return {"index": news.index} | responses.tool_call(news.id, news.name, news.arguments)
