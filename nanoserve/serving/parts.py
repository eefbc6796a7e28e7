"""An answer as a list of parts in the order in which the model wrote them: thoughts, texts, calls.

Chat joins all words of an answer; Messages and Responses keep each part apart, with an event when it begins and ends.
The parts, joined, do not depend on how the tokens were grouped into deltas.
"""

import uuid
from dataclasses import dataclass, field
from enum import Enum

from nanoserve.text.postprocess import Delta


class PartKind(Enum):
    """What a part is."""

    THOUGHTS = "thoughts"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, kw_only=True)
class Part:
    """One part that grows. ``call_id`` and ``name`` are those of a call, whose pieces are its arguments."""

    kind: PartKind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    hex_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """A part begins."""

    part: Part


@dataclass(frozen=True, slots=True)
class Grew:
    """``text`` was added to a part."""

    part: Part
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A part is complete."""

    part: Part


News = Opened | Grew | Closed


class Parts:
    """Collects the deltas of one answer. At most one part, the last of ``all``, is open."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._is_open = False

    def feed(self, delta: Delta) -> list[News]:
        """What a delta changes; its finish reason closes the last part."""
        news: list[News] = []
        if delta.reasoning:
            self._grow(PartKind.THOUGHTS, delta.reasoning, news)
        for piece in delta.pieces():
            if isinstance(piece, str):
                self._grow(PartKind.TEXT, piece, news)
                continue
            if piece.name is not None:
                self._open(PartKind.CALL, news, call_id=piece.id or "", name=piece.name)
            if piece.arguments:
                self._grow(PartKind.CALL, piece.arguments, news)
        if delta.finish_reason is not None:
            self._close(news)
        return news

    def _grow(self, kind: PartKind, text: str, news: list[News]) -> None:
        if not self._is_open or self.all[-1].kind is not kind:
            self._open(kind, news)
        self.all[-1].pieces.append(text)
        news.append(Grew(self.all[-1], text))

    def _open(self, kind: PartKind, news: list[News], *, call_id: str = "", name: str = "") -> None:
        self._close(news)
        self.all.append(Part(kind=kind, index=len(self.all), call_id=call_id, name=name))
        self._is_open = True
        news.append(Opened(self.all[-1]))

    def _close(self, news: list[News]) -> None:
        if self._is_open:
            self._is_open = False
            news.append(Closed(self.all[-1]))
