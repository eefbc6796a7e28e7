"""Least loaded first, ties spread by request."""

from nanoserve.routing.policy import EngineLoad, rank


def order(*loads: EngineLoad, request_id: str = "r") -> list[str]:
    return [load.key for load in rank(loads, request_id=request_id)]


def test_fewest_requests_win_whether_reported_or_booked() -> None:
    busy = EngineLoad(key="busy", num_running=3, num_waiting=1)
    booked = EngineLoad(key="booked", num_booked=5)
    free = EngineLoad(key="free", num_running=1)
    assert order(busy, booked, free) == ["free", "busy", "booked"]


def test_own_bookings_are_part_of_the_report_and_not_added_to_it() -> None:
    reported = EngineLoad(key="reported", num_running=4, num_booked=4)
    assert order(EngineLoad(key="other", num_running=5), reported) == ["reported", "other"]


def test_equal_counts_are_told_apart_by_prompt_tokens_then_by_free_blocks() -> None:
    long = EngineLoad(key="long", num_waiting=1, num_waiting_tokens=900)
    full = EngineLoad(key="full", num_waiting=1, num_waiting_tokens=10, num_blocks=10, num_free_blocks=1)
    free = EngineLoad(key="free", num_waiting=1, num_waiting_tokens=10, num_blocks=10, num_free_blocks=9)
    assert order(long, full, free) == ["free", "full", "long"]


def test_ties_are_spread_over_the_engines_and_do_not_depend_on_their_order() -> None:
    loads = [EngineLoad(key=key) for key in "abcd"]
    firsts = [order(*loads, request_id=f"r{i}")[0] for i in range(400)]
    assert all(firsts.count(key) > 50 for key in "abcd")
    assert firsts == [order(*reversed(loads), request_id=f"r{i}")[0] for i in range(400)]


def test_no_engine_no_choice() -> None:
    assert rank([], request_id="r") == []
