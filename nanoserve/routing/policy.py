"""Which replica takes a request: a pure function of what the feeds last told.

Least loaded first. Another signal (session affinity, prefix hits) is one more term of ``_cost``; nothing outside this
module knows how the choice is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One replica's load as a door sees it.

    ``num_running``, ``num_waiting`` and ``num_waiting_tokens`` come from the engine and count every door's requests;
    ``num_booked`` counts this door's own open requests there, so it already knows of those the engine has not reported.
    """

    key: str
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_booked: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0


def rank(loads: Sequence[EngineLoad], *, request_id: str) -> list[EngineLoad]:
    """``loads`` in order of preference for the request; ties are spread by request, so that doors do not herd."""
    return sorted(loads, key=lambda load: (*_cost(load), crc32(f"{request_id}/{load.key}".encode())))


def _cost(load: EngineLoad) -> tuple[float, ...]:
    """Requests there, then prompt tokens ahead, then how full the KV pool is: smaller is better, compared in order."""
    num_requests = max(load.num_booked, load.num_running + load.num_waiting)
    fullness = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
    return num_requests, load.num_waiting_tokens, round(fullness, 1)
