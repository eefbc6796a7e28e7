"""Choosing among many without looking at all of them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.routing.board import FEW, WIDTH, Board
from nanoserve.routing.kv_index import NO_HITS, PrefixChain
from nanoserve.routing.policy import LOAD_BOUND, LOAD_SLACK, Demand, EngineLoad, load_limit, rank


def demand(tie: str, num_tokens: int = 400, session_id: str = "") -> Demand:
    return Demand(num_tokens=num_tokens, tie=tie, session_id=session_id, hit_tokens={})


def board_of(counts: dict[str, int]) -> Board:
    board = Board()
    for key, num_requests in counts.items():
        board.put(EngineLoad(key=key, num_running=num_requests))
    return board


COUNTS = st.dictionaries(st.uuids().map(str), st.integers(0, 60), min_size=1, max_size=60)


@given(COUNTS, st.text(max_size=4), st.sampled_from(["", "s"]))
def test_every_engine_is_a_choice_once_and_the_overrun_come_last(
    counts: dict[str, int], tie: str, session_id: str
) -> None:
    loads = list(board_of(counts).choices(demand(tie, session_id=session_id), NO_HITS))
    assert sorted(load.key for load in loads) == sorted(counts)
    limit = load_limit(sum(counts.values()), len(counts))
    overrun = [load.num_requests + 1 > limit for load in loads]
    assert overrun == sorted(overrun)


@given(COUNTS, st.text(max_size=4), st.sampled_from(["", "s"]), st.randoms())
def test_doors_that_learned_of_engines_in_another_order_choose_alike(
    counts: dict[str, int], tie: str, session_id: str, rng: object
) -> None:
    asked = demand(tie, session_id=session_id)
    other = board_of(dict.fromkeys([*counts, "gone"], 99))
    other.drop("gone")
    for key, num_requests in sorted(counts.items()):
        other.put(EngineLoad(key=key, num_running=num_requests))
    assert list(board_of(counts).choices(asked, NO_HITS)) == list(other.choices(asked, NO_HITS))


@given(st.dictionaries(st.uuids().map(str), st.integers(0, 60), min_size=1, max_size=FEW), st.text(max_size=4))
def test_among_a_few_the_choice_is_that_of_the_policy(counts: dict[str, int], tie: str) -> None:
    loads = [EngineLoad(key=key, num_running=n) for key, n in counts.items()]
    assert next(board_of(counts).choices(demand(tie), NO_HITS)) == rank(loads, demand(tie))[0]


def test_many_engines_stay_balanced_though_only_a_few_are_looked_at() -> None:
    board = board_of({f"e{i}": 0 for i in range(200)})
    booked = Counter[str]()
    for number in range(200 * 30):
        key = next(board.choices(demand(f"r{number}"), NO_HITS)).key
        booked[key] += 1
        board.put(EngineLoad(key=key, num_booked=booked[key]))
    assert max(booked.values()) <= 1.15 * 30
    assert min(booked.values()) >= 0.8 * 30


def test_one_hot_prefix_goes_to_a_few_and_spreads_when_they_are_overrun() -> None:
    board = board_of({f"e{i}": 0 for i in range(200)})
    booked = Counter[str]()
    for _ in range(2000):
        key = next(board.choices(demand("hot"), NO_HITS)).key
        booked[key] += 1
        board.put(EngineLoad(key=key, num_booked=booked[key]))
        if sum(booked.values()) == WIDTH * LOAD_SLACK:
            assert len(booked) == WIDTH
    assert max(booked.values()) <= LOAD_BOUND * 10 + LOAD_SLACK + 1


@pytest.mark.parametrize("num_engines", [FEW, 100])
def test_who_holds_most_of_a_prompt_is_found_wherever_it_stands(num_engines: int) -> None:
    board = board_of({f"e{i}": 2 for i in range(num_engines)})
    chain = PrefixChain(range(1000), block_size=16, salts=("",))
    keys = list(chain)
    for i in range(num_engines):
        board.kv.reset(f"e{i}", keys[:3])
    board.kv.update("e7", keys[:40], ())
    first = next(board.choices(demand("r", num_tokens=1000), board.kv.find(chain)))
    assert first.key == "e7"


def test_sessions_move_only_when_their_engine_leaves() -> None:
    board = board_of({f"e{i}": 1 for i in range(60)})
    asked = {f"s{i}": demand(f"r{i}", session_id=f"s{i}") for i in range(300)}
    homes = {name: next(board.choices(each, NO_HITS)).key for name, each in asked.items()}
    assert len(set(homes.values())) > 45
    board.drop("e5")
    for name, home in homes.items():
        assert home == "e5" or next(board.choices(asked[name], NO_HITS)).key == home
