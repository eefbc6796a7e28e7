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


class Backlog:
    """Requests and prompt tokens of those that wait, in all and by tenant. One thread changes it, any may read."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._of: dict[str, tuple[int, int]] = {}

    def add(self, request: GenerateRequest) -> None:
        self._change(request.tenant, 1, len(request.prompt_token_ids))

    def remove(self, request: GenerateRequest) -> None:
        self._change(request.tenant, -1, -len(request.prompt_token_ids))

    def of(self, tenant: str) -> tuple[int, int]:
        """The tenant's requests and prompt tokens."""
        return self._of.get(tenant, (0, 0))

    @property
    def tenants(self) -> frozenset[str]:
        """Who has anything here."""
        return frozenset(self._of.copy())

    def _change(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        own_requests, own_tokens = self.of(tenant)
        if own_requests + num_requests:
            self._of[tenant] = own_requests + num_requests, own_tokens + num_tokens
        else:
            del self._of[tenant]


def has_room(limit: int, *, num_all: int, num_own: int, num_tenants: int) -> bool:
    """Whether a bounded place takes a newcomer that makes it hold ``num_all``, ``num_own`` of them its tenant's.

    A full place still takes those of a tenant that holds less than its part of the limit, or one tenant's flood would
    turn the others away. So ``n`` tenants that come one after the other fill it to ``1 + 1/2 + ... + 1/n`` limits.
    """
    return num_all <= limit or num_own * num_tenants <= limit


class ServiceRate:
    """How fast requests and tokens have left a queue of late. One thread records; any may ask."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left: deque[tuple[float, int]] = deque(maxlen=128)

    def record(self, num_tokens: int) -> None:
        """A request with so many tokens left."""
        self._left.append((self._clock(), num_tokens))

    def wait_s(self, num_requests: int, num_tokens: int = 0) -> float:
        """Seconds until so many have left at the recent rate, from 1 to 60; 1 without history."""
        left = list(self._left)
        if not left:
            return 1.0
        period_s = max(self._clock() - left[0][0], 1e-3)
        num_tokens_left = sum(tokens for _, tokens in left)
        wait_s = max(num_requests / len(left), num_tokens / max(num_tokens_left, 1)) * period_s
        return min(max(wait_s, 1.0), _MAX_RETRY_AFTER_S)


class QueueBounds:
    """Refuses requests beyond the queue's bounds, with a Retry-After from the recent rate of admissions.

    The scheduler records admissions; any thread may check.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._rate = ServiceRate(clock)

    def record(self, num_prompt_tokens: int) -> None:
        """A request left the queue for the first time."""
        self._rate.record(num_prompt_tokens)

    def check(self, request: GenerateRequest, *waiting: Backlog) -> None:
        """Raise QueueFullError when this request does not fit behind those that wait.

        A tenant with nothing in the queue may always put one request there, however long its prompt.
        """
        tenant, num_tokens = request.tenant, len(request.prompt_token_ids)
        own_requests, own_tokens = (sum(counts) for counts in zip(*(each.of(tenant) for each in waiting), strict=True))
        if not own_requests:
            return
        num_requests = sum(each.num_requests for each in waiting)
        all_tokens = sum(each.num_tokens for each in waiting)
        num_tenants = len(frozenset[str]().union(*(each.tenants for each in waiting)))
        wanted = (
            (self._max_requests, num_requests + 1, own_requests + 1),
            (self._max_tokens, all_tokens + num_tokens, own_tokens + num_tokens),
        )
        if all(has_room(limit, num_all=n, num_own=own, num_tenants=num_tenants) for limit, n, own in wanted):
            return
        raise QueueFullError(
            f"The queue is full: {num_requests} requests with {all_tokens} prompt tokens wait already.",
            retry_after_s=self._rate.wait_s(
                num_requests + 1 - self._max_requests, all_tokens + num_tokens - self._max_tokens
            ),
        )
