"""Thoughts and answer, the same in every cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.text.policy import Thinking
from nanoserve.text.reasoning import ReasoningSplit

AUTO, OPEN, OFF = Thinking.AUTO, Thinking.OPEN, Thinking.OFF


def split(thinking: Thinking, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningSplit(thinking)
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("thinking", "text", "parts"),
    [
        (AUTO, "<think>\nweigh both\n</think>\n\nPick it.\n", ("weigh both", "Pick it.\n")),
        (AUTO, "<think>a</think>b", ("a", "b")),
        (AUTO, "\n <think>\n\n</think>\n\nb", ("", "b")),
        (AUTO, "Plain answer 42.", ("", "Plain answer 42.")),
        (AUTO, " <thin air", ("", " <thin air")),
        (AUTO, "so <think>a</think>", ("", "so <think>a</think>")),
        (AUTO, "<think>\na\n\nb\n", ("a\n\nb", "")),
        (AUTO, "<think>\nnever </thin", ("never </thin", "")),
        (AUTO, "<think>a</think></think>", ("a", "</think>")),
        (AUTO, "<think>", ("", "")),
        (AUTO, "<thi", ("", "<thi")),
        (AUTO, "", ("", "")),
        (OPEN, "\nhm\n</think>\n\nyes", ("hm", "yes")),
        (OPEN, "cut off", ("cut off", "")),
        (OPEN, "a < b </ c", ("a < b </ c", "")),
        (OFF, "<think>a</think>b", ("", "<think>a</think>b")),
    ],
)
def test_texts(thinking: Thinking, text: str, parts: tuple[str, str]) -> None:
    assert split(thinking, [text]) == parts
    assert split(thinking, list(text)) == parts


@given(
    thinking=st.sampled_from(Thinking),
    tokens=st.lists(
        st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "\n", " ", "a", "<", ">"]), max_size=12
    ),
    data=st.data(),
)
def test_the_cut_changes_nothing(thinking: Thinking, tokens: list[str], data: st.DataObject) -> None:
    text = "".join(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(thinking, pieces) == split(thinking, [text])
