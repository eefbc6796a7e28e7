"""``POST /v1/messages``: a chat in Anthropic's shape, as a reply or as events."""

import uuid
from dataclasses import dataclass

import orjson

from nanoserve.protocol import anthropic
from nanoserve.protocol.anthropic import MessagesRequest
from nanoserve.protocol.errors import renaming
from nanoserve.protocol.responses import Json
from nanoserve.protocol.sse import named_event
from nanoserve.serving.answer import EventWriter, StreamStyle
from nanoserve.serving.door import Door, ServedModel
from nanoserve.serving.generation import Generation
from nanoserve.serving.parts import Grew, News, Opened, Part, PartKind, Parts
from nanoserve.text.from_messages import chat_of
from nanoserve.text.postprocess import Delta

# What this route calls the fields of a chat.
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "thinking_token_budget": "thinking",
}
STYLE = StreamStyle(ping=anthropic.PING, fault=anthropic.error_event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """One request to this route, ready to be answered."""

    generation: Generation
    id: str

    async def reply(self) -> bytes:
        parts, delta = Parts(), Delta()
        async with self.generation.choice() as choice:
            async for delta in choice.deltas():
                parts.feed(delta)
        content = [_block(part) for part in parts.all]
        stop = anthropic.stop_members(delta.finish_reason, delta.stop_reason)
        return orjson.dumps(self._message(content, self._usage(delta), stop))

    async def stream(self, writer: EventWriter) -> None:
        parts, has_started = Parts(), False
        async with self.generation.choice() as choice:
            async for delta in choice.deltas():
                events = [] if has_started else [self._start(delta)]
                has_started = True
                events += [event for news in parts.feed(delta) for event in _events(news)]
                if delta.finish_reason is not None:
                    events += self._end(delta)
                if events:
                    await writer.write(b"".join(map(named_event, events)), last=delta.finish_reason is not None)

    def _start(self, delta: Delta) -> Json:
        usage = self._usage(delta) | {"output_tokens": 0}
        return {"type": "message_start", "message": self._message([], usage, None)}

    def _end(self, delta: Delta) -> list[Json]:
        stop = anthropic.stop_members(delta.finish_reason, delta.stop_reason)
        return [{"type": "message_delta", "delta": stop, "usage": self._usage(delta)}, {"type": "message_stop"}]

    def _message(self, content: list[Json], usage: Json, stop: Json | None) -> Json:
        return anthropic.message(self.id, self.generation.model.name, content=content, usage=usage, stop=stop)

    def _usage(self, delta: Delta) -> Json:
        num_prompt_tokens = len(self.generation.prompts[0].prompt_token_ids)
        return anthropic.usage(num_prompt_tokens, delta.num_completion_tokens, delta.num_cached_tokens)


def prepare(door: Door, model: ServedModel, body: MessagesRequest, fingerprint: str) -> Messages:
    """Judges the request; nothing was asked of an engine yet.

    Raises:
        InvalidRequestError: it can never be answered.
    """
    id_ = f"msg_{uuid.uuid4().hex}"
    with renaming(_NAMES):
        chat = chat_of(body)
        prompt = model.preprocessor.chat(chat, id_)
    generation = Generation(door=door, model=model, body=chat, prompts=[prompt])
    return Messages(generation=generation, id=id_)


def _block(part: Part, *, text: str | None = None) -> Json:
    """A content block; ``text`` is what it holds when that is not all."""
    text = part.text if text is None else text
    if part.kind is PartKind.THOUGHTS:
        return anthropic.thinking_block(text)
    if part.kind is PartKind.TEXT:
        return anthropic.text_block(text)
    return anthropic.tool_use_block(part.call_id, part.name, text)


def _events(news: News) -> list[Json]:
    index = news.part.index
    if isinstance(news, Opened):
        return [{"type": "content_block_start", "index": index, "content_block": _block(news.part, text="")}]
    if isinstance(news, Grew):
        return [_delta(index, _grown(news))]
    signed = news.part.kind is PartKind.THOUGHTS
    signature: Json = {"type": "signature_delta", "signature": anthropic.signature(news.part.text)}
    return [*([_delta(index, signature)] if signed else []), {"type": "content_block_stop", "index": index}]


def _delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _grown(news: Grew) -> Json:
    if news.part.kind is PartKind.THOUGHTS:
        return {"type": "thinking_delta", "thinking": news.text}
    if news.part.kind is PartKind.TEXT:
        return {"type": "text_delta", "text": news.text}
    return {"type": "input_json_delta", "partial_json": news.text}
