"""What doors and engines say to each other, and how it is written: msgpack frames, decoded into checked values.

Down: one ``Greeting``, then ``Control`` frames of ``Submit``, ``Abort`` and ``Ping``. Up: one ``Hello``, then ``Items``
(one item a step) and an ``Answers`` for each ``Control``, in order. A frame is its length in four bytes, then msgpack;
never pickle, which would run what a stranger sends.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nanoserve.core.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    NanoserveError,
    QueueFullError,
    UnavailableError,
)
from nanoserve.core.outputs import RequestOutput, StepStats
from nanoserve.core.request import GenerateRequest
from nanoserve.serving.step_totals import StepTotals

MAX_FRAME_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCard:
    """What an engine is, told once. ``engine_id`` names one life of one replica; ``info`` describes the model.
    ``cache_salt`` begins the names of its blocks."""

    engine_id: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    cache_salt: str
    max_num_seqs: int
    info: Mapping[str, Any]


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Start the request; its id is the attempt's id."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop the request and free what it holds; an unknown id is no error."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """This door lives, though it has nothing to say."""


Op = Submit | Abort | Ping


class Greeting(msgspec.Struct, frozen=True):
    """A door's first word. ``seq`` and ``engine_id`` name the last item that it saw."""

    secret: str
    door_id: str
    seq: int
    engine_id: str


class Control(msgspec.Struct, frozen=True):
    """Ops of one moment, in order."""

    ops: list[Op]


@dataclass(frozen=True, slots=True)
class FeedItem:
    """One step's news for one door. ``state`` and ``reason`` are the engine's health when it was sent. ``totals`` comes
    with a heartbeat."""

    seq: int
    outputs: tuple[RequestOutput, ...]
    stats: StepStats
    state: str
    reason: str
    totals: StepTotals | None = None


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First word of a feed. ``resumed``: every item after the one asked for follows; otherwise earlier requests of this
    door were dropped, items start after ``seq``, and ``blocks`` are the keys of all blocks that are cached by then."""

    card: EngineCard
    resumed: bool
    seq: int
    blocks: list[int] = []


class Items(msgspec.Struct, frozen=True, tag=True):
    """Consecutive news, oldest first."""

    items: list[FeedItem]


class Refusal(msgspec.Struct, frozen=True):
    """A :class:`NanoserveError` on its way to the door."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 1.0

    @classmethod
    def of(cls, error: NanoserveError) -> "Refusal":
        return cls(error.type, error.message, error.param, error.code, getattr(error, "retry_after_s", 1.0))

    def error(self) -> NanoserveError:
        if self.type == QueueFullError.type:
            return QueueFullError(self.message, retry_after_s=self.retry_after_s)
        known = _REFUSALS.get(self.type, EngineDeadError)
        return known(self.message, param=self.param, code=self.code)


_REFUSALS: dict[str, type[NanoserveError]] = {
    error.type: error for error in (InvalidRequestError, DeadlineError, UnavailableError, EngineDeadError)
}


class Answers(msgspec.Struct, frozen=True, tag=True):
    """Per op of one ``Control`` None or why it was refused."""

    answers: list[Refusal | None]


_ENCODER = msgspec.msgpack.Encoder()
greetings = msgspec.msgpack.Decoder(Greeting)
controls = msgspec.msgpack.Decoder(Control)
news = msgspec.msgpack.Decoder(Hello | Items | Answers)


def frame(value: Greeting | Control | Hello | Items | Answers) -> bytes:
    body = _ENCODER.encode(value)
    return len(body).to_bytes(4, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame's body.

    Raises:
        EOFError: the other side has closed. ConnectionError: it broke, or sent what is no frame.
    """
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {size} bytes")
    return await reader.readexactly(size)


def merge(parts: Sequence[RequestOutput], request_id: str) -> RequestOutput:
    """Consecutive outputs of one request (at least one) as one, under ``request_id``."""
    last = parts[-1]
    return RequestOutput(
        request_id=request_id,
        new_token_ids=tuple(token_id for part in parts for token_id in part.new_token_ids),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        prompt_logprobs=tuple(entry for part in parts for entry in part.prompt_logprobs),
        num_cached_tokens=parts[0].num_cached_tokens,
        error=last.error,
        pooled=last.pooled,
    )
