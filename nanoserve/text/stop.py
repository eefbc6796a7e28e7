"""Stop strings in a text that arrives in pieces: nothing of a match is shown, nothing else is lost."""

import re
from collections.abc import Sequence


class StopMatcher:
    """Holds back the longest tail that may still become a stop string.

    The match that is complete first wins, the longest of those that end together: so the result does not depend on how
    the text was cut into tokens.
    """

    __slots__ = ("_held", "_include", "_starts", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._starts = re.compile("|".join(re.escape(first) for first in {stop[0] for stop in stops}) or r"(?!)")

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text to show, the stop string that was completed by ``text``). Unarmed, complete matches are passed over."""
        if not self._held and self._starts.search(text) is None:
            return text, None
        num_old = len(self._held)
        buffer = self._held + text
        if armed and (match := self._first_match(buffer, num_old)):
            end, stop = match
            self._held = ""
            return buffer[: end if self._include else end - len(stop)], stop
        num_shown = self._num_safe(buffer)
        self._held = buffer[num_shown:]
        return buffer[:num_shown], None

    def finish(self) -> str:
        """What was held back and became no match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[0], best[2])

    def _num_safe(self, buffer: str) -> int:
        num_safe = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= start < num_safe:
                if stop.startswith(buffer[start:]):
                    num_safe = start
                    break
                start = buffer.find(stop[0], start + 1)
        return num_safe


def partial_suffix(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag`` (fewer than all of it)."""
    start = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while start >= 0:
        if tag.startswith(text[start:]):
            return len(text) - start
        start = text.find(tag[0], start + 1)
    return 0
