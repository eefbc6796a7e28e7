"""What an engine tells its doors after a step."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from nanoserve.core.plan import TokenLogprobs


class FinishReason(StrEnum):
    """Why a request ended. ``ERROR`` carries a message in ``RequestOutput.error``.

    ``LENGTH`` is also the end of a request that wanted no token: one that scores or pools its prompt.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestOutput(NamedTuple):
    """News of one request: the tokens since the last output, never earlier ones.

    A stop or EOS token that ended the request is the last of ``new_token_ids`` and repeated as ``stop_token_id``.
    ``num_cached_tokens`` counts the prompt tokens whose KV was reused at first admission. ``error`` is (type, message).
    ``pooled`` comes with the last output of a request that pools; see ``PoolingParams`` for its form.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    error: tuple[str, str] | None = None
    pooled: bytes = b""


class RequestEvent(NamedTuple):
    """Something that a step did with a request, at the engine's Unix time ``at_s``.

    "admitted": it got its place, with ``num_tokens`` cached. "chunk": ``num_tokens`` of its prompt are computed.
    "preempted": its place was given to another, ``num_tokens`` were computed by then.
    """

    request_id: str
    kind: str
    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Counts and seconds of one step, or of an idle engine. ``num_*_total`` are counters since the start.

    ``num_draft_tokens_total`` counts guessed tokens that were verified, ``num_accepted_tokens_total`` the right ones.
    ``blocks_published`` and ``blocks_evicted`` are the prefix-cache events of the step, as block keys
    (``hashing.block_key``); evictions come first.
    Blocks in lower tiers count as held there: an eviction is told when the last tier forgets.
    ``num_host_blocks`` and ``num_disk_blocks`` are the tiers' sizes, ``num_*_cached`` what is findable there,
    ``num_kept_blocks_total`` went down to the host, ``num_brought_up_blocks_total`` came from it to the pool,
    ``num_fetched_blocks_total`` from the disk to it, and ``num_lost_blocks_total`` the disk failed to write or read.
    ``queue_times_s``: of each request that was first admitted, how long it had waited since it arrived at the door.
    ``events``: what the step did with requests, in order.
    """

    step_id: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_scheduled_tokens: int = 0
    num_prompt_tokens_total: int = 0
    num_cached_tokens_total: int = 0
    num_generated_tokens_total: int = 0
    num_preemptions_total: int = 0
    num_finished_total: int = 0
    num_aborted_total: int = 0
    num_draft_tokens_total: int = 0
    num_accepted_tokens_total: int = 0
    num_host_blocks: int = 0
    num_host_blocks_cached: int = 0
    num_disk_blocks: int = 0
    num_disk_blocks_cached: int = 0
    num_kept_blocks_total: int = 0
    num_brought_up_blocks_total: int = 0
    num_fetched_blocks_total: int = 0
    num_lost_blocks_total: int = 0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0
    blocks_published: tuple[int, ...] = field(default=())
    blocks_evicted: tuple[int, ...] = field(default=())
    queue_times_s: tuple[float, ...] = field(default=())
    events: tuple[RequestEvent, ...] = field(default=())
