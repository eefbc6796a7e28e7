"""What doors and engines say to each other: plain frozen values, pickled by Serve's handles.

Down: ``Submit``, ``Abort`` and ``Ping``, several in one call. Up: one ``Hello``, then lists of ``FeedItem``, one item a
step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.core.outputs import RequestOutput, StepStats
from nanoserve.core.request import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCard:
    """What an engine is, told once. ``engine_id`` names one life of one replica; ``info`` describes the model."""

    engine_id: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Submit:
    """Start the request; its id is the attempt's id."""

    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the request and free what it holds; an unknown id is no error."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Ping:
    """This door lives, though it has nothing to say."""


Op = Submit | Abort | Ping


@dataclass(frozen=True, slots=True)
class Hello:
    """First word of a feed. ``resumed``: every item after the one asked for follows; otherwise earlier requests of this
    door were dropped, and items start after ``seq``."""

    card: EngineCard
    resumed: bool
    seq: int


@dataclass(frozen=True, slots=True)
class FeedItem:
    """One step's news for one door. ``state`` and ``reason`` are the engine's health when it was sent."""

    seq: int
    outputs: tuple[RequestOutput, ...]
    stats: StepStats
    state: str
    reason: str


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
    )
