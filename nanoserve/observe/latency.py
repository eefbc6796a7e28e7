"""What the times of a run's tokens amount to: latencies, throughput, and goodput under an objective.

TTFT: from when a request was due to its first token. ITL: between two arrivals of tokens, however many came together.
TPOT: the time after the first token, a token. E2E: until the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """When one request was sent (or was due) and when each of its tokens came, in seconds of one clock."""

    sent_s: float
    token_times_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        num_later = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / num_later if num_later else None

    @property
    def gaps_s(self) -> list[float]:
        times = list(dict.fromkeys(self.token_times_s))
        return [later - earlier for earlier, later in pairwise(times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The latencies that a request has to keep to count as good."""

    ttft_s: float
    tpot_s: float

    def is_met(self, trace: Trace) -> bool:
        return trace.ttft_s <= self.ttft_s and (trace.tpot_s or 0.0) <= self.tpot_s


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0..1) of the values lie, linearly interpolated; 0 for none."""
    if not values:
        return 0.0
    ordered, place = sorted(values), share * (len(values) - 1)
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def latencies(traces: Sequence[Trace]) -> dict[str, Figures]:
    """Mean and percentiles in milliseconds, by name; a name without any value is left out."""
    values = {
        "ttft_ms": [trace.ttft_s for trace in traces],
        "itl_ms": [gap for trace in traces for gap in trace.gaps_s],
        "tpot_ms": [trace.tpot_s for trace in traces if trace.tpot_s is not None],
        "e2e_ms": [trace.e2e_s for trace in traces],
    }
    return {name: _spread([1e3 * value for value in seconds]) for name, seconds in values.items() if seconds}


def _spread(values: Sequence[float]) -> Figures:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {"mean": sum(values) / len(values)} | {name: percentile(values, share) for name, share in shares.items()}


def throughput(traces: Sequence[Trace], num_input_tokens: int, objective: Objective) -> Figures:
    """Rates over the whole run, from the first request sent to the last token (at least one trace)."""
    wall_s = max(trace.token_times_s[-1] for trace in traces) - min(trace.sent_s for trace in traces)
    num_tokens = sum(len(trace.token_times_s) for trace in traces)
    num_good = sum(objective.is_met(trace) for trace in traces)
    return {
        "wall_s": wall_s,
        "input_tokens": num_input_tokens,
        "output_tokens": num_tokens,
        "requests_per_s": len(traces) / wall_s,
        "output_tokens_per_s": num_tokens / wall_s,
        "total_tokens_per_s": (num_tokens + num_input_tokens) / wall_s,
        "goodput_requests_per_s": num_good / wall_s,
        "good_share": num_good / len(traces),
    }
