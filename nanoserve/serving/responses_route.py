"""``POST /v1/responses``: a chat in the shape of OpenAI's Responses, as a reply or as events.

The reply is what the events add up to, so both are equal by construction.
"""

import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from nanoserve.core.errors import InvalidRequestError, NanoserveError
from nanoserve.protocol import openai_responses as wire
from nanoserve.protocol.errors import ItemNotFoundError, envelope, renaming
from nanoserve.protocol.openai import ChatCompletionRequest
from nanoserve.protocol.openai_responses import ResponsesRequest
from nanoserve.protocol.responses import Json, chat_entries
from nanoserve.protocol.sse import named_event
from nanoserve.serving.answer import EventWriter, StreamStyle
from nanoserve.serving.door import Door, ServedModel
from nanoserve.serving.generation import Generation
from nanoserve.serving.parts import Grew, News, Opened, Part, PartKind, Parts
from nanoserve.serving.response_store import ResponseStore, StoredResponse
from nanoserve.text.from_responses import chat_of, input_messages, messages_of
from nanoserve.text.logprobs import TokenText
from nanoserve.text.policy import Thinking
from nanoserve.text.postprocess import Delta
from nanoserve.text.preprocess import PreparedRequest

MAX_PAGE = 100
Keep = Callable[[str, StoredResponse], None]
# What this route calls the fields of a chat.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
_ID_PREFIX = {PartKind.THOUGHTS: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """One request to this route, ready to be answered. ``keep`` remembers the finished response."""

    generation: Generation
    body: ResponsesRequest
    messages: Sequence[dict[str, Any]]
    answer: "Answer"
    keep: Keep

    @property
    def style(self) -> StreamStyle:
        return StreamStyle(fault=self.answer.fault)

    async def reply(self) -> bytes:
        async with self.generation.choice() as choice:
            async for delta in choice.deltas():
                self.answer.feed(delta)
        return self._kept()

    async def stream(self, writer: EventWriter) -> None:
        has_started = False
        async with self.generation.choice() as choice:
            async for delta in choice.deltas():
                events = [] if has_started else self.answer.start()
                has_started = True
                events += self.answer.feed(delta)
                if events:
                    await writer.write(b"".join(map(named_event, events)), last=delta.finish_reason is not None)
        self._kept()

    def _kept(self) -> bytes:
        reply = orjson.dumps(self.answer.response)
        if self.body.store is not False:
            messages = [*self.messages, *messages_of(self.answer.output)]
            items = wire.input_items(self.body.input)
            self.keep(self.answer.id, StoredResponse.of(reply, messages, items, self.answer.output))
        return reply


def resolved(body: ResponsesRequest, stored: ResponseStore) -> ResponsesRequest:
    """The body with the items themselves in the place of references to them (``{"type": "item_reference", "id"}``).

    Raises:
        ItemNotFoundError: an item is not remembered here.
    """
    if isinstance(body.input, str) or not any(map(_is_reference, body.input)):
        return body
    return body.model_copy(update={"input": [_resolved(item, stored) for item in body.input]})


def _is_reference(item: Json) -> bool:
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _resolved(item: Json, stored: ResponseStore) -> Json:
    if not _is_reference(item):
        return item
    item_id = str(item.get("id"))
    found = stored.item(item_id)
    if found is None:
        raise ItemNotFoundError(item_id)
    return found


def page(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """A page of a list of items: ``order`` (desc, asc), ``after`` (an item's id), ``limit`` (1 to 100).

    Raises:
        InvalidRequestError: one of these is wrong.
    """
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"`order` must be asc or desc. Given: {order!r:.60}.", param="order")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_PAGE:
        raise InvalidRequestError(f"`limit` must be in [1, {MAX_PAGE}]. Given: {limit!r:.60}.", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    places = {item["id"]: place for place, item in enumerate(ordered)}
    if after is not None and after not in places:
        raise InvalidRequestError(f"`after` must be the id of an item. Given: {after!r:.100}.", param="after")
    rest = ordered if after is None else ordered[places[after] + 1 :]
    return wire.item_list(rest[: int(limit)], has_more=len(rest) > int(limit))


def prepare(model: ServedModel, body: ResponsesRequest, door: Door, history: Sequence[Any], keep: Keep) -> Responses:
    """Judges the request; nothing was asked of an engine yet. ``history``: the messages of the responses before.

    Raises:
        InvalidRequestError: it can never be answered.
    """
    id_ = f"resp_{uuid.uuid4().hex}"
    with renaming(_NAMES):
        messages = [*history, *input_messages(body)]
        chat, prompt = _prompt(model, body, messages, id_)
    tags = model.tokenizer.id_of("<think>"), model.tokenizer.id_of("</think>")
    answer = Answer(id_, model.name, body, prompt, ThoughtEntries(prompt.policy.thinking, *tags))
    generation = Generation(door=door, model=model, body=chat, prompts=[prompt])
    return Responses(generation=generation, body=body, messages=messages, answer=answer, keep=keep)


def _prompt(
    model: ServedModel, body: ResponsesRequest, messages: Sequence[Any], id_: str
) -> tuple[ChatCompletionRequest, PreparedRequest]:
    """The prompt; with ``truncation: auto`` as few of the oldest messages are dropped as make it fit."""

    def prepared(num_dropped: int) -> tuple[ChatCompletionRequest, PreparedRequest]:
        chat = chat_of(body, messages[num_dropped:])
        return chat, model.preprocessor.chat(chat, id_)

    def fits(num_dropped: int) -> bool:
        try:
            prepared(num_dropped)
        except InvalidRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return False
        return True

    if body.truncation != "auto" or fits(0):
        return prepared(0)
    return prepared(bisect_left(range(1, len(messages)), True, key=fits) + 1)


class ThoughtEntries:
    """Tells the log probabilities of the answer's text from those of the thoughts before it, by the tags' tokens."""

    def __init__(self, thinking: Thinking, open_id: int | None, close_id: int | None) -> None:
        self._open_id = open_id if thinking is Thinking.AUTO else None
        self._close_id = close_id
        self._is_inside = thinking is Thinking.OPEN and close_id is not None

    def dropped(self, entries: Sequence[TokenText]) -> list[TokenText]:
        """``entries`` without those of thoughts."""
        kept = []
        for entry in entries:
            if self._is_inside:
                self._is_inside = entry.token_id != self._close_id
            elif entry.token_id == self._open_id:
                self._open_id, self._is_inside = None, True
            else:
                kept.append(entry)
        return kept


@dataclass(slots=True)
class _Logprobs:
    """Of the text under way: those not sent yet, and those of each text part so far."""

    pending: list[Json] = field(default_factory=list)
    of_part: dict[int, list[Json]] = field(default_factory=dict)

    def take(self, index: int) -> list[Json]:
        taken, self.pending = self.pending, []
        self.of_part.setdefault(index, []).extend(taken)
        return taken


class Answer:
    """A response that grows, and the events that say how. ``response`` is the object as it is now."""

    def __init__(
        self, id_: str, model: str, body: ResponsesRequest, prompt: PreparedRequest, thoughts: ThoughtEntries
    ) -> None:
        self.id = id_
        self.response = wire.response(id_, int(time.time()), model, body)
        sampling = prompt.choices[0].sampling
        self.response |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        self._num_prompt_tokens = len(prompt.prompt_token_ids)
        self._seals = body.wants_encrypted_thoughts
        self._parts = Parts()
        self._thoughts = thoughts
        self._logprobs = _Logprobs()
        self._num_events = 0
        self._is_cut = False

    @property
    def output(self) -> list[Json]:
        """The items so far; the last one is incomplete where the answer was cut."""
        last = len(self._parts.all) - 1
        return [self._item(part, cut=self._is_cut and part.index == last) for part in self._parts.all]

    def start(self) -> list[Json]:
        return [self._event(f"response.{name}", response=dict(self.response)) for name in ("created", "in_progress")]

    def feed(self, delta: Delta) -> list[Json]:
        """The events of a delta; the last one brings the whole response."""
        self._logprobs.pending += chat_entries(self._thoughts.dropped(delta.logprobs))
        self._is_cut = delta.finish_reason == "length"
        events = [event for news in self._parts.feed(delta) for event in self._events(news)]
        return events if delta.finish_reason is None else [*events, self._finish(delta)]

    def fault(self, error: NanoserveError) -> bytes:
        """A failure after the first event, in both shapes that clients know."""
        self.response |= {"status": "failed", "error": wire.failure(error), "output": self.output}
        told = orjson.loads(envelope(error))
        members = {name: told["error"][name] for name in ("code", "message", "param")}
        failed = self._event("response.failed", response=self.response)
        return named_event(failed) + named_event(self._event("error", **members, **told))

    def _finish(self, delta: Delta) -> Json:
        status = "incomplete" if self._is_cut else "completed"
        self.response |= {
            "status": status,
            "completed_at": None if self._is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "output": self.output,
            "usage": wire.usage(
                self._num_prompt_tokens,
                delta.num_completion_tokens,
                cached_tokens=delta.num_cached_tokens,
                reasoning_tokens=delta.num_reasoning_tokens,
            ),
        }
        return self._event(f"response.{status}", response=self.response)

    def _event(self, type_: str, **members: object) -> Json:
        self._num_events += 1
        return {"type": type_, "sequence_number": self._num_events - 1} | members

    def _events(self, news: News) -> list[Json]:
        part = news.part
        if isinstance(news, Opened):
            item = self._item(part, begun=True)
            added = [self._event("response.output_item.added", output_index=part.index, item=item)]
            return added if part.kind is PartKind.CALL else [*added, self._content("added", part, text="")]
        if isinstance(news, Grew):
            return [self._grown(part, news.text)]
        return self._closed(part)

    def _grown(self, part: Part, text: str) -> Json:
        if part.kind is PartKind.CALL:
            return self._about("response.function_call_arguments.delta", part, delta=text)
        if part.kind is PartKind.THOUGHTS:
            return self._about("response.reasoning_text.delta", part, content_index=0, delta=text)
        logprobs = self._logprobs.take(part.index)
        return self._about("response.output_text.delta", part, content_index=0, delta=text, logprobs=logprobs)

    def _closed(self, part: Part) -> list[Json]:
        if part.kind is PartKind.CALL:
            done = [self._about("response.function_call_arguments.done", part, name=part.name, arguments=part.text)]
        elif part.kind is PartKind.THOUGHTS:
            done = [self._about("response.reasoning_text.done", part, content_index=0, text=part.text)]
            done.append(self._content("done", part))
        else:
            self._logprobs.take(part.index)
            logprobs = self._logprobs.of_part[part.index]
            done = [
                self._about("response.output_text.done", part, content_index=0, text=part.text, logprobs=logprobs),
                self._content("done", part),
            ]
        item = self._item(part, cut=self._is_cut)
        return [*done, self._event("response.output_item.done", output_index=part.index, item=item)]

    def _about(self, type_: str, of: Part, **members: object) -> Json:
        return self._event(type_, item_id=_id(of), output_index=of.index, **members)

    def _content(self, what: str, part: Part, *, text: str | None = None) -> Json:
        inner = self._inner(part, part.text if text is None else text)
        return self._about(f"response.content_part.{what}", part, content_index=0, part=inner)

    def _inner(self, part: Part, text: str) -> Json:
        if part.kind is PartKind.THOUGHTS:
            return wire.reasoning_part(text)
        return wire.text_part(text, self._logprobs.of_part.get(part.index, ()))

    def _item(self, part: Part, *, begun: bool = False, cut: bool = False) -> Json:
        """The output item of a part, ``begun`` without any content."""
        status = "in_progress" if begun else "incomplete" if cut else "completed"
        text = "" if begun else part.text
        if part.kind is PartKind.CALL:
            return wire.call_item(_id(part), status, call_id=part.call_id, name=part.name, arguments=text)
        content = [] if begun else [self._inner(part, text)]
        if part.kind is PartKind.TEXT:
            return wire.message_item(_id(part), status, content)
        return wire.reasoning_item(_id(part), status, content, sealed=text if self._seals else None)


def _id(part: Part) -> str:
    return f"{_ID_PREFIX[part.kind]}_{part.hex_id}"
