"""Thoughts apart from the answer: ``<think> ... </think>``, read as text, so it holds for any cut into tokens.

Newlines just inside the tags and between ``</think>`` and the answer belong to neither part.
"""

from collections.abc import Sequence

from nanoserve.text.policy import Thinking
from nanoserve.text.stop import partial_suffix

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"


class ThoughtCount:
    """Counts the tokens of thoughts, between the tags where these are tokens of their own. ``num_tokens``: so far."""

    __slots__ = ("_close_id", "_is_inside", "_open_id", "num_tokens")

    def __init__(self, thinking: Thinking, open_id: int | None, close_id: int | None) -> None:
        self.num_tokens = 0
        self._close_id = close_id
        self._open_id = open_id if thinking is Thinking.AUTO else None
        self._is_inside = thinking is Thinking.OPEN and close_id is not None

    def add(self, token_ids: Sequence[int]) -> None:
        if self._open_id is not None and self._open_id in token_ids:
            token_ids = token_ids[token_ids.index(self._open_id) + 1 :]
            self._open_id, self._is_inside = None, True
        if self._is_inside and self._close_id in token_ids:
            token_ids = token_ids[: token_ids.index(self._close_id)]
            self._is_inside = False
            self.num_tokens += len(token_ids)
        elif self._is_inside:
            self.num_tokens += len(token_ids)


class ReasoningSplit:
    """A text stream into (reasoning, content). States go one way: start, thoughts, gap, answer."""

    __slots__ = ("_held", "_state", "_trims")

    def __init__(self, thinking: Thinking) -> None:
        start = {Thinking.OFF: self._answer, Thinking.AUTO: self._start, Thinking.OPEN: self._thoughts}
        self._state = start[thinking]
        self._held = ""
        self._trims = True

    def feed(self, text: str) -> tuple[str, str]:
        """The (reasoning, content) that became certain."""
        if self._state == self._answer:
            return "", text
        self._held += text
        return self._state()

    def finish(self) -> tuple[str, str]:
        """What was held back: a broken tag is text of the part in which it stands."""
        held, self._held = self._held, ""
        return (
            (held.strip("\n") if self._trims else held.rstrip("\n"), "")
            if self._state == self._thoughts
            else ("", held)
        )

    def _start(self) -> tuple[str, str]:
        text = self._held.lstrip()
        if text.startswith(OPEN_TAG):
            self._held = text[len(OPEN_TAG) :]
            self._state = self._thoughts
            return self._state()
        if OPEN_TAG.startswith(text):
            return "", ""
        self._state = self._answer
        return self._answer()

    def _thoughts(self) -> tuple[str, str]:
        if self._trims:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return "", ""
            self._trims = False
        thoughts, tag, rest = self._held.partition(CLOSE_TAG)
        if tag:
            self._held = rest
            self._state = self._gap
            return thoughts.rstrip("\n"), self._gap()[1]
        shown = self._held[: len(self._held) - partial_suffix(self._held, CLOSE_TAG)].rstrip("\n")
        self._held = self._held[len(shown) :]
        return shown, ""

    def _gap(self) -> tuple[str, str]:
        self._held = self._held.lstrip("\n")
        if not self._held:
            return "", ""
        self._state = self._answer
        return self._answer()

    def _answer(self) -> tuple[str, str]:
        text, self._held = self._held, ""
        return "", text
