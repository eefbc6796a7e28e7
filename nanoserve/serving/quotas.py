"""What a key may use: requests and tokens a minute, and open requests.

Routers do not talk to each other about this: each holds an equal part of every quota, so that all together never grant
more than the whole. A client whose connections all end at one router therefore gets that router's part only.

A rate is a bucket that fills evenly and holds a minute's worth. Answers are paid for as they come, so a bucket can go
below zero; then the key waits until it has filled again. In the long run the rate holds exactly.
"""

import math
from collections.abc import Callable
from typing import Protocol

from nanoserve.protocol.errors import QuotaError


class Limits(Protocol):
    """What an operator set for a key; None: no limit."""

    @property
    def requests_per_minute(self) -> int | None: ...
    @property
    def tokens_per_minute(self) -> int | None: ...
    @property
    def max_concurrent_requests(self) -> int | None: ...


_ROUNDING = 1e-6
"""Credit that may be missing: who waits as long as it was told is not to be refused for the last bit of a sum."""


class Bucket:
    """Credit that grows by ``per_minute`` a minute up to a minute's worth, but never less than one."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.capacity = max(1.0, per_minute)
        self._rate = per_minute / 60.0
        self._clock = clock
        self._credit, self._as_of_s = self.capacity, clock()

    def credit(self) -> float:
        now_s = self._clock()
        self._credit = min(self.capacity, self._credit + (now_s - self._as_of_s) * self._rate)
        self._as_of_s = now_s
        return self._credit

    def take(self, amount: float) -> None:
        self._credit = self.credit() - amount

    def wait_s(self, amount: float) -> float:
        """Seconds until there is credit for ``amount``, or for all that the bucket can hold; 0: now."""
        missing = min(amount, self.capacity) - self.credit()
        return 0.0 if missing < _ROUNDING else missing / self._rate


class Quota:
    """One key's quota at this router: its part, 1 / ``num_routers`` of the whole."""

    def __init__(self, limits: Limits, num_routers: int, clock: Callable[[], float]) -> None:
        def bucket(per_minute: int | None) -> Bucket | None:
            return None if per_minute is None else Bucket(per_minute / num_routers, clock)

        self._requests = bucket(limits.requests_per_minute)
        self._tokens = bucket(limits.tokens_per_minute)
        most = limits.max_concurrent_requests
        self._max_open = math.inf if most is None else most // num_routers
        self._num_open = 0

    def enter(self) -> None:
        """An HTTP request begins; ``leave`` is called when it has ended.

        Raises:
            QuotaError: it is one too many now.
        """
        if self._num_open >= self._max_open:
            raise QuotaError(f"This key may have {self._max_open} requests open at once here.", retry_after_s=1.0)
        if self._requests is not None and (wait_s := self._requests.wait_s(1.0)):
            raise QuotaError("This key's requests of this minute are used up.", retry_after_s=wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1.0)):
            raise QuotaError("This key's tokens of this minute are used up.", retry_after_s=wait_s)
        if self._requests is not None:
            self._requests.take(1.0)
        self._num_open += 1

    def leave(self) -> None:
        self._num_open -= 1

    def reserve(self, num_tokens: int) -> None:
        """A prompt is about to be sent to an engine. One above the whole quota goes when nothing of that is used.

        Raises:
            QuotaError: its tokens are not left in this minute.
        """
        if self._tokens is None:
            return
        if wait_s := self._tokens.wait_s(num_tokens):
            raise QuotaError(
                f"The prompt of {num_tokens} tokens exceeds what is left of this key's tokens of this minute.",
                retry_after_s=wait_s,
            )
        self._tokens.take(num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Tokens were generated (or, below 0, a reserved prompt was refused)."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What OpenAI's API says of its limits; nothing where there are none."""
        headers = []
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers += [
                    (f"x-ratelimit-limit-{name}".encode(), b"%d" % bucket.capacity),
                    (f"x-ratelimit-remaining-{name}".encode(), b"%d" % max(0.0, bucket.credit())),
                    (f"x-ratelimit-reset-{name}".encode(), _duration(bucket.wait_s(bucket.capacity))),
                ]
        return headers


def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: ``6m0s``, ``1.2s``, ``17ms``."""
    if seconds < 1:
        return b"%dms" % math.ceil(1e3 * seconds)
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{int(minutes)}m{rest:g}s".encode() if minutes else f"{rest:g}s".encode()
