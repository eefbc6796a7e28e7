"""What an engine refuses: requests that can never fit, and requests for which the waiting queue has no room.

Invariant: an accepted request can always finish. It fits the pool alone, and it ends with LENGTH where the context or
the pool ends, whoever else is there.
"""

from collections import deque
from collections.abc import Callable

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.errors import InvalidRequestError, QueueFullError
from nanoserve.core.request import GenerateRequest

_MAX_RETRY_AFTER_S = 60.0


def max_length(request: GenerateRequest, config: SchedulerConfig) -> int:
    """Tokens, prompt included, at which the request ends with LENGTH. The last one needs no KV, so no slot."""
    bound = min(config.max_model_len, config.num_blocks * config.block_size + 1)
    max_tokens = request.sampling.max_tokens
    if max_tokens is None:
        return bound
    return min(bound, len(request.prompt_token_ids) - request.num_prior_output_tokens + max_tokens)


def validate(request: GenerateRequest, config: SchedulerConfig) -> None:
    """Raise InvalidRequestError when the request can never be served here."""
    num_tokens = len(request.prompt_token_ids)
    if not num_tokens:
        raise InvalidRequestError("The prompt must hold at least one token. Given: 0.", param="prompt")
    if not 0 <= request.num_prior_output_tokens < num_tokens:
        raise InvalidRequestError(
            f"`num_prior_output_tokens` must be in [0, {num_tokens - 1}]. Given: {request.num_prior_output_tokens}.",
            param="num_prior_output_tokens",
        )
    # A continued request may have reached the end of the context in its earlier life.
    needs_room = request.sampling.max_tokens != 0 and not request.num_prior_output_tokens
    _check_length(num_tokens, config.max_model_len, needs_room=needs_room, what="context length")
    num_target_tokens = num_tokens - (num_tokens >= max_length(request, config) and request.pooling is None)
    if num_target_tokens > config.num_blocks * config.block_size:
        _check_length(num_tokens, config.num_blocks * config.block_size, needs_room=False, what="KV cache")


def _check_length(num_tokens: int, limit: int, *, needs_room: bool, what: str) -> None:
    if num_tokens > limit - needs_room:
        room = " and leave room for one token" if needs_room else ""
        raise InvalidRequestError(
            f"The prompt must fit the {what} of {limit} tokens{room}. Given: {num_tokens} tokens.",
            param="prompt",
            code="context_length_exceeded",
        )


class QueueBounds:
    """Refuses requests beyond the queue's bounds, with a Retry-After from the recent rate of admissions.

    The scheduler records admissions; any thread may check.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._clock = clock
        self._admissions: deque[tuple[float, int]] = deque(maxlen=128)

    def record(self, num_prompt_tokens: int) -> None:
        """A request left the queue for the first time."""
        self._admissions.append((self._clock(), num_prompt_tokens))

    def check(self, num_prompt_tokens: int, *, num_ahead: int, num_tokens_ahead: int) -> None:
        """Raise QueueFullError when this prompt does not fit behind those ahead. An empty queue takes any prompt."""
        num_tokens_over = num_tokens_ahead + num_prompt_tokens - self._max_tokens
        num_over = num_ahead + 1 - self._max_requests
        if num_ahead and (num_over > 0 or num_tokens_over > 0):
            raise QueueFullError(
                f"The queue is full: {num_ahead} requests with {num_tokens_ahead} prompt tokens wait already.",
                retry_after_s=self._retry_after_s(num_over, num_tokens_over),
            )

    def _retry_after_s(self, num_over: int, num_tokens_over: int) -> float:
        """Seconds until so many requests and tokens have left at the recent rate, from 1 to 60; 1 without history."""
        admissions = list(self._admissions)
        if not admissions:
            return 1.0
        period_s = max(self._clock() - admissions[0][0], 1e-3)
        num_tokens = sum(tokens for _, tokens in admissions)
        wait_s = max(num_over / len(admissions), num_tokens_over / max(num_tokens, 1)) * period_s
        return min(max(wait_s, 1.0), _MAX_RETRY_AFTER_S)
