"""Stop strings across any cut of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.text.stop import StopMatcher, partial_suffix


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include=include)
    shown = []
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.finish()], None


def slow(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        fits = [stop for stop in stops if text[:end].endswith(stop)]
        if fits:
            longest = max(fits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_the_first_completed_match_wins_in_every_cut(stops: list[str], pieces: list[str]) -> None:
    shown, stop = run(stops, pieces)
    assert ("".join(shown), stop) == slow(stops, "".join(pieces))


@given(pieces=st.lists(st.text("STOP-x", max_size=3), max_size=12))
def test_no_part_of_a_stop_string_is_shown_before_it_is_certain(pieces: list[str]) -> None:
    shown, stop = run(["STOP"], pieces)
    seen, text = "", "".join(pieces)
    for piece in shown[: len(pieces)]:
        seen += piece
        assert text.startswith(seen)
        assert "STOP" not in seen
    if stop:
        assert text.startswith(seen + "STOP")


def test_the_stop_string_is_kept_on_demand() -> None:
    assert run(["STOP"], ["a ST", "OP b"], include=True) == (["a ", "STOP"], "STOP")


def test_the_earliest_of_several_wins() -> None:
    shown, stop = run(["mma S", "STOP"], ["alpha beta gam", "ma STOP-HERE"])
    assert ("".join(shown), stop) == ("alpha beta ga", "mma S")


def test_nothing_held_back_is_lost() -> None:
    assert run(["STOP-HERE"], ["tail STOP-", "HER"]) == (["tail ", "", "STOP-HER"], None)


def test_an_unarmed_match_is_passed_over_and_a_later_one_is_not() -> None:
    matcher = StopMatcher([" two"], include=False)
    assert matcher.feed("one two", armed=False) == ("one two", None)
    assert matcher.feed(" t", armed=False) == ("", None)
    assert matcher.feed("wo three") == ("", " two")


@pytest.mark.parametrize(("text", "length"), [("abc<", 1), ("a<too", 4), ("<tool>", 0), ("<<tool_call", 10), ("", 0)])
def test_partial_suffix(text: str, length: int) -> None:
    assert partial_suffix(text, "<tool_call>") == length
