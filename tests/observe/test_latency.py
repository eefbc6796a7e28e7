"""Figures of runs whose times are known."""

import pytest

from nanoserve.observe.latency import Objective, Trace, latencies, percentile, throughput
from nanoserve.observe.workloads import Workload, arrivals

STEADY = Trace(sent_s=10.0, token_times_s=(10.5, 10.6, 10.7, 10.8))
GROUPED = Trace(sent_s=10.0, token_times_s=(11.0, 11.0, 11.4, 11.4, 11.4))
ONE = Trace(sent_s=12.0, token_times_s=(12.25,))


def test_each_latency_by_hand() -> None:
    assert STEADY.ttft_s == 0.5
    assert STEADY.e2e_s == pytest.approx(0.8)
    assert STEADY.tpot_s == pytest.approx(0.1)
    assert STEADY.gaps_s == pytest.approx([0.1, 0.1, 0.1])
    assert GROUPED.tpot_s == pytest.approx(0.1)
    assert GROUPED.gaps_s == pytest.approx([0.4]), "tokens that come together come once"
    assert (ONE.tpot_s, ONE.gaps_s) == (None, [])


def test_spreads_are_in_milliseconds() -> None:
    spreads = latencies([STEADY, GROUPED, ONE])
    assert spreads["ttft_ms"] == pytest.approx({"mean": 1750 / 3, "p50": 500, "p90": 900, "p99": 990})
    assert spreads["itl_ms"]["p50"] == pytest.approx(100)
    assert spreads["itl_ms"]["p99"] == pytest.approx(391)
    assert set(latencies([ONE])) == {"ttft_ms", "e2e_ms"}
    assert latencies([]) == {}
    assert percentile([], 0.5) == 0.0


def test_rates_are_over_the_whole_run() -> None:
    figures = throughput([STEADY, GROUPED, ONE], 100, Objective(ttft_s=0.5, tpot_s=0.11))
    assert figures["wall_s"] == pytest.approx(2.25)
    assert (figures["output_tokens"], figures["input_tokens"]) == (10, 100)
    assert figures["output_tokens_per_s"] == pytest.approx(10 / 2.25)
    assert figures["total_tokens_per_s"] == pytest.approx(110 / 2.25)
    assert figures["good_share"] == pytest.approx(2 / 3), "the grouped one was late with its first token"
    strict = throughput([STEADY, GROUPED, ONE], 100, Objective(ttft_s=5, tpot_s=0.09))
    assert strict["goodput_requests_per_s"] == pytest.approx(1 / 2.25), "an answer of one token has no pace to keep"


def test_arrivals_are_seeded_and_of_the_rate() -> None:
    times = arrivals(50.0, 5000, 1)
    assert times == sorted(times) == arrivals(50.0, 5000, 1) != arrivals(50.0, 5000, 2)
    assert times[-1] == pytest.approx(100, rel=0.05)
    assert arrivals(float("inf"), 3, 1) == [0.0] * 3


def test_a_workload_is_its_seed() -> None:
    fields = {"num_requests": 20, "input_tokens": (4, 9), "output_tokens": (2, 3), "num_shared_tokens": 5}
    items = Workload(**fields).items()  # type: ignore[arg-type]
    assert items == Workload(**fields).items() != Workload(**fields, seed=1).items()  # type: ignore[arg-type]
    assert len({item.prompt_token_ids[:5] for item in items}) == 1
    assert {len(item.prompt_token_ids) for item in items} == set(range(9, 15))
    assert {item.num_output_tokens for item in items} == {2, 3}
