"""A trace of shared prefixes in virtual time, over the real scheduler."""

from benchmarks.routing import BLOCK_SIZE, LeastLoad, measure
from nanoserve.observe.simulate import DoorChooser, reachable
from nanoserve.observe.trace import Chats


def test_prefixes_are_found_again_and_no_replica_is_overrun() -> None:
    trace = Chats(num_requests=600)
    ours = measure(trace, 4, DoorChooser())
    assert ours["hit_tokens"] >= 0.85 * reachable(trace.arrivals(), BLOCK_SIZE)
    assert ours["load_imbalance"] <= 1.3
    assert ours["hit_tokens"] > 1.2 * measure(trace, 4, LeastLoad(4))["hit_tokens"]
