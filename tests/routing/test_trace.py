"""A trace of shared prefixes in virtual time, over the real scheduler."""

from benchmarks.routing import Prefixes, Trace, least_load, measure, reachable


def test_prefixes_are_found_again_and_no_replica_is_overrun() -> None:
    trace = Trace(num_requests=600)
    ours = measure(trace, 4, Prefixes(sessions=False))
    assert ours["hit_tokens"] >= 0.85 * reachable(trace)
    assert ours["load_imbalance"] <= 1.3
    assert ours["hit_tokens"] > 1.2 * measure(trace, 4, least_load)["hit_tokens"]
