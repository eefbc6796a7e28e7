"""``POST /v1/completions``: one or several prompts, ``n`` choices each, as a reply or as events.

Choices are numbered over all prompts in order: prompt ``p``, choice ``c`` has index ``p * n + c``.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from nanoserve.protocol import responses
from nanoserve.protocol.openai import CompletionRequest
from nanoserve.protocol.sse import ChunkTemplate, members
from nanoserve.serving.answer import EventWriter
from nanoserve.serving.door import Door, ServedModel
from nanoserve.serving.generation import Choice, Generation
from nanoserve.text.logprobs import TokenText
from nanoserve.text.postprocess import Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One request to this route, ready to be answered."""

    generation: Generation
    body: CompletionRequest
    id: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def _envelope(self) -> responses.Json:
        name = self.generation.model.name
        return responses.envelope("text_completion", self.id, self.created, name, self.fingerprint)

    async def reply(self) -> bytes:
        texts, usage = await self.generation.collect(lambda choice: Text(choice, self.body))
        return orjson.dumps(self._envelope() | {"choices": [text.choice() for text in texts], "usage": usage})

    async def stream(self, writer: EventWriter) -> None:
        envelope = self._envelope()
        await self.generation.write(writer, envelope, lambda choice: Chunks(envelope, choice, self.body))


def prepare(door: Door, model: ServedModel, body: CompletionRequest, fingerprint: str) -> Completion:
    """Judges the request; nothing was asked of an engine yet.

    Raises:
        InvalidRequestError: it can never be answered.
    """
    id_ = f"cmpl-{uuid.uuid4().hex}"
    prompts = model.preprocessor.completion(body, id_)
    generation = Generation(door=door, model=model, body=body, prompts=prompts)
    return Completion(generation=generation, body=body, id=id_, fingerprint=fingerprint)


def _asked(body: CompletionRequest, choice: Choice, prompt_logprobs: Sequence[TokenText]) -> responses.Json:
    """What vLLM tells about a choice's prompt when it is asked to."""
    about: responses.Json = {}
    if body.prompt_logprobs is not None:
        about["prompt_logprobs"] = responses.prompt_logprobs(prompt_logprobs)
    if body.return_token_ids:
        about["prompt_token_ids"] = list(choice.prompt.prompt_token_ids)
    return about


class Text:
    """One choice of a plain reply: collects its deltas."""

    def __init__(self, choice: Choice, body: CompletionRequest) -> None:
        self._choice = choice
        self._body = body
        self._content: list[str] = []
        self._logprobs: list[TokenText] = []
        self._prompt_logprobs: list[TokenText] = []
        self._token_ids: list[int] = []
        self._last = Delta()

    def add(self, delta: Delta) -> None:
        self._content.append(delta.content)
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        self._token_ids += delta.new_token_ids
        self._last = delta

    def choice(self) -> responses.Json:
        has_logprobs = self._body.logprobs is not None
        choice: responses.Json = {
            "index": self._choice.index,
            "text": "".join(self._content),
            "logprobs": responses.completion_logprobs(self._logprobs) if has_logprobs else None,
            "finish_reason": self._last.finish_reason,
            "stop_reason": self._last.stop_reason,
            "seed": self._choice.request.sampling.seed,
        }
        ids: responses.Json = {"token_ids": self._token_ids} if self._body.return_token_ids else {}
        return choice | ids | _asked(self._body, self._choice, self._prompt_logprobs)


class Chunks:
    """One choice of a stream: one event a delta that says something; the finish reason rides on the last one."""

    def __init__(self, envelope: responses.Json, choice: Choice, body: CompletionRequest) -> None:
        self._template = ChunkTemplate(envelope, index=choice.index, member="text")
        self._choice = choice
        self._body = body
        self._has_logprobs = body.logprobs is not None
        self._started = False

    def render(self, delta: Delta, usage: bytes) -> bytes:
        """The event of one delta, nothing when it has nothing to say. ``usage``: the member the chunk ends with."""
        logprobs, extra = b"null", b""
        if self._has_logprobs and delta.logprobs:
            logprobs = orjson.dumps(responses.completion_logprobs(delta.logprobs))
        if self._body.return_token_ids and delta.new_token_ids:
            extra = members(token_ids=delta.new_token_ids)
        if not self._started:
            extra += members(**_asked(self._body, self._choice, delta.prompt_logprobs))
        if not (delta.content or delta.finish_reason or extra or logprobs != b"null"):
            return b""
        self._started = True
        finish = b"null"
        if delta.finish_reason is not None:
            finish = orjson.dumps(delta.finish_reason)
            extra += members(stop_reason=delta.stop_reason, seed=self._choice.request.sampling.seed)
        text = orjson.dumps(delta.content)
        return self._template.render(text, logprobs=logprobs, finish=finish, extra=extra, top=usage)
