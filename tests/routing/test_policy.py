"""Prefixes attract, queues repel, nobody is overrun, and every door decides alike."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nanoserve.routing.policy import LOAD_BOUND, LOAD_SLACK, Demand, EngineLoad, rank


def order(*loads: EngineLoad, num_tokens: int = 100, tie: str = "r", session_id: str = "", **hits: int) -> list[str]:
    demand = Demand(num_tokens=num_tokens, tie=tie, session_id=session_id, hit_tokens=hits)
    return [load.key for load in rank(loads, demand)]


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


def test_a_long_prefix_is_worth_a_short_wait_and_no_more() -> None:
    holder = EngineLoad(key="holder", num_running=3)
    idle = EngineLoad(key="idle", num_running=2)
    assert order(holder, idle, num_tokens=1000, holder=900)[0] == "holder"
    assert order(holder, idle, num_tokens=1000, holder=16)[0] == "idle"
    queued = EngineLoad(key="holder", num_running=3, num_waiting_tokens=4000)
    assert order(queued, idle, num_tokens=1000, holder=900)[0] == "idle"


def test_a_hot_prefix_spreads_when_its_holder_is_overrun() -> None:
    booked = Counter[str]()
    for _ in range(400):
        loads = [EngineLoad(key=key, num_booked=booked[key]) for key in "abcd"]
        booked[order(*loads, num_tokens=2000, a=1984)[0]] += 1
    assert booked["a"] == max(booked.values())
    assert booked["a"] <= LOAD_BOUND * 100 + LOAD_SLACK + 1


def test_a_session_stays_where_it_is_until_that_replica_is_overrun() -> None:
    loads = [EngineLoad(key=key, num_running=2) for key in "abcd"]
    home = order(*loads, session_id="s")[0]
    assert order(*reversed(loads), session_id="s", tie="another request")[0] == home
    rest = [load for load in loads if load.key != home]
    assert order(EngineLoad(key=home, num_running=3), *rest, session_id="s")[0] == home
    assert order(EngineLoad(key=home, num_running=40), *rest, session_id="s")[0] != home


def test_sessions_move_only_when_their_replica_leaves() -> None:
    loads = [EngineLoad(key=key) for key in "abcde"]
    homes = {f"s{i}": order(*loads, session_id=f"s{i}")[0] for i in range(300)}
    assert all(Counter(homes.values())[key] > 30 for key in "abcde")
    for session, home in homes.items():
        assert home == "c" or order(*(x for x in loads if x.key != "c"), session_id=session)[0] == home


def test_ties_are_spread_over_the_engines_and_do_not_depend_on_their_order() -> None:
    loads = [EngineLoad(key=key) for key in "abcd"]
    firsts = [order(*loads, tie=f"r{i}")[0] for i in range(400)]
    assert all(firsts.count(key) > 60 for key in "abcd")
    assert firsts == [order(*reversed(loads), tie=f"r{i}")[0] for i in range(400)]


def test_no_engine_no_choice() -> None:
    assert order() == []


LOADS = st.lists(
    st.builds(
        EngineLoad,
        key=st.uuids().map(str),
        num_running=st.integers(0, 50),
        num_waiting=st.integers(0, 50),
        num_waiting_tokens=st.integers(0, 5000),
        num_booked=st.integers(0, 50),
        num_blocks=st.just(100),
        num_free_blocks=st.integers(0, 100),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda load: load.key,
)


@given(LOADS, st.data(), st.integers(1, 5000), st.text(max_size=3))
def test_a_choice_is_a_permutation_that_order_does_not_change(
    loads: list[EngineLoad], data: st.DataObject, num_tokens: int, session_id: str
) -> None:
    hits = {load.key: data.draw(st.integers(0, num_tokens - 1)) for load in loads if data.draw(st.booleans())}
    demand = Demand(num_tokens=num_tokens, tie="t", session_id=session_id, hit_tokens=hits)
    ranked = rank(loads, demand)
    assert sorted(load.key for load in ranked) == sorted(load.key for load in loads)
    assert ranked == rank(data.draw(st.permutations(loads)), demand)


@given(LOADS, st.data(), st.integers(1, 5000))
def test_the_first_is_never_overrun_while_another_is_not(
    loads: list[EngineLoad], data: st.DataObject, num_tokens: int
) -> None:
    hits = {load.key: data.draw(st.integers(0, num_tokens - 1)) for load in loads}
    first = rank(loads, Demand(num_tokens=num_tokens, tie="t", hit_tokens=hits))[0]
    mean = (1 + sum(load.num_requests for load in loads)) / len(loads)
    assert first.num_requests + 1 <= LOAD_BOUND * mean + LOAD_SLACK


@given(LOADS, st.integers(0, 5), st.integers(1, 5000))
def test_more_hits_never_make_a_replica_less_liked(loads: list[EngineLoad], which: int, num_tokens: int) -> None:
    chosen = loads[which % len(loads)].key

    def place(num_hits: int) -> int:
        demand = Demand(num_tokens=num_tokens, tie="t", hit_tokens={chosen: num_hits})
        return [load.key for load in rank(loads, demand)].index(chosen)

    assert place(num_tokens - 1) <= place(num_tokens // 2) <= place(0)
