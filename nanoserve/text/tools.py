"""Tool calls in an answer: between ``<tool_call>`` and ``</tool_call>`` a JSON object (Hermes' form, read here) or
Qwen3-Coder's elements (read by ``xml_calls``).

What is no valid call comes back as content, unchanged. That needs the whole call before any of it is shown, so a call
is held until it is complete; only one that grows past ``STREAM_AFTER`` characters is shown as it comes, so that a long
document does not look like a stall.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nanoserve.text.messages import is_json_object
from nanoserve.text.stop import partial_suffix

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
STREAM_AFTER = 512

_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
_INSIDE_STRING = re.compile(r'["\\]')
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of one tool call. ``id`` and ``name`` come once, with the first delta of an index.

    ``offset``: how many characters of the content that comes with it the model wrote before it.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str
    offset: int = 0

    def behind(self, content: str) -> "ToolCallDelta":
        """The same news with more content in front of it."""
        return replace(self, offset=self.offset + len(content)) if content else self


class CallReader(Protocol):
    """One call under way.

    ``malformed``: it is none, and ``text`` is content. ``complete``: it ended before ``rest``, as a ``valid`` one or
    not. ``streaming``: it is shown before it is complete. ``fragment``: arguments that were not shown yet.
    """

    text: str
    malformed: bool
    complete: bool
    streaming: bool
    valid: bool
    name: str
    fragment: str
    rest: str

    def read(self, text: str) -> None:
        """Take in more text."""

    def flush(self) -> None:
        """The text ends here."""


class ToolParser:
    """A content stream into content and calls. ``num_calls`` counts the complete, parsable ones that were shown.

    White space between calls, before the first and after the last belongs to the markup. With ``parallel`` off, calls
    after the first are dropped.
    """

    def __init__(self, *, parallel: bool = True, new_call: Callable[[], CallReader] | None = None) -> None:
        self.num_calls = 0
        self._new_call = new_call or HermesCall
        self._is_announced = False
        self._parallel = parallel
        self._num_shown = 0
        self._after_call = False
        self._expects_close = False
        self._held = ""
        self._lead = ""
        self._call: CallReader | None = None

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """The content and the calls that became certain."""
        deltas: list[ToolCallDelta] = []
        if self._is_plain(text):
            return text, deltas
        content = ""
        rest: str | None = text
        while rest is not None:
            news: list[ToolCallDelta] = []
            if self._call is None:
                shown, rest = self._read_text(rest)
            else:
                shown, rest = self._read_call(self._call, rest, news)
            deltas += [delta.behind(content) for delta in news]
            content += shown
        return content, deltas

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """What was held back: an unfinished call is content, unless its beginning was already shown as a call."""
        deltas: list[ToolCallDelta] = []
        content = ""
        while (call := self._call) is not None and not call.streaming:
            content += self._as_content()
            more, new = self.feed(call.text)
            deltas += [delta.behind(content) for delta in new]
            content += more
        if call is not None and self._shows:
            call.flush()
            deltas += [delta.behind(content) for delta in self._take(call)]
        held, self._held, self._call = self._held, "", None
        markup = self._expects_close or (self._after_call and held.isspace())
        return content + ("" if markup else held), deltas

    def _is_plain(self, text: str) -> bool:
        """The common piece: nothing is held, nothing in it could open a call or be white space before one."""
        return not (self._held or self._call or self._after_call or OPEN_TAG[0] in text or text[-1:].isspace())

    def _read_text(self, text: str) -> tuple[str, str | None]:
        buffer = self._held + text
        if self._expects_close:
            stripped = buffer.lstrip()
            if len(stripped) < len(CLOSE_TAG) and CLOSE_TAG.startswith(stripped):
                self._held = buffer
                return "", None
            self._expects_close = False
            buffer = stripped.removeprefix(CLOSE_TAG) if stripped.startswith(CLOSE_TAG) else buffer
        content, tag, rest = buffer.partition(OPEN_TAG)
        if tag:
            shown = content.rstrip()
            self._lead, self._held, self._call = content[len(shown) :], "", self._new_call()
            self._is_announced = False
            self._after_call = self._after_call and not shown
            return shown, rest
        shown = buffer[: len(buffer) - partial_suffix(buffer, OPEN_TAG)].rstrip()
        self._held = buffer[len(shown) :]
        self._after_call = self._after_call and not shown
        return shown, None

    @property
    def _shows(self) -> bool:
        return self._num_shown == 0 or self._parallel

    def _take(self, call: CallReader) -> list[ToolCallDelta]:
        """The deltas of what is new about a call that may be shown."""
        if not (call.streaming or call.complete):
            return []
        index, deltas = self._num_shown, []
        if not self._is_announced:
            deltas.append(ToolCallDelta(index, f"call_{uuid.uuid4().hex[:24]}", call.name, ""))
        deltas += [ToolCallDelta(index, None, None, call.fragment)] if call.fragment else []
        self._is_announced, call.fragment = True, ""
        return deltas

    def _read_call(self, call: CallReader, text: str, deltas: list[ToolCallDelta]) -> tuple[str, str | None]:
        call.read(text)
        if call.malformed:
            return self._as_content(), call.text
        if self._shows:
            deltas += self._take(call)
        if not call.complete:
            return "", None
        self.num_calls += self._shows and call.valid
        self._num_shown += 1
        self._after_call = self._expects_close = True
        self._call = None
        return "", call.rest

    def _as_content(self) -> str:
        """Give up on the call: its opening is content; the caller reads the rest again as text."""
        self._call = None
        lead, self._lead = self._lead, ""
        return lead + OPEN_TAG


class HermesCall:
    """One call under way: a scan for the end of its object, which may lie anywhere but inside a string."""

    def __init__(self) -> None:
        self.text = ""
        self.malformed = self.complete = self.streaming = self.valid = False
        self.name = ""
        self.fragment = ""
        self.rest = ""
        self._position = self._depth = 0
        self._in_string = self._decided = False
        self._arguments = ""
        self._arguments_start = self._arguments_end = -1

    def read(self, text: str) -> None:
        """Take in more text and say what is known now: ``malformed``, ``complete``, or a ``fragment`` to show.

        Whether a call is shown early is decided at one character, so the result does not depend on the pieces.
        """
        self.text += text
        if not self.streaming:
            end = self._scan(STREAM_AFTER)
            if end >= 0:
                self._close(end)
                return
            if not self.malformed and self._position >= STREAM_AFTER and not self._decided:
                self._open()
        if not self.malformed and (self.streaming or self._position >= STREAM_AFTER):
            self._stream()

    def _close(self, end: int) -> None:
        call = _parse(self.text[:end])
        if call is None:
            self.malformed = True
            return
        self.name, self.fragment = call
        self.complete = self.valid = True
        self.rest = self.text[end:]

    def _open(self) -> None:
        self._decided = True
        opened = _parse_opening(self.text[:STREAM_AFTER])
        if opened is not None:
            self.name, self._arguments_start = opened
            self.streaming = True

    def _stream(self) -> None:
        end = self._scan(len(self.text))
        if not self.streaming:
            if end >= 0:
                self._close(end)
            return
        self._show_until(self._position)
        if end >= 0 or self.malformed:
            self.complete, self.malformed = True, False
            self.valid = is_json_object(self._arguments)
            self.rest = self.text[end if end >= 0 else self._position :]

    def flush(self) -> None:
        """The text ends here: show what is left of the arguments."""
        self._show_until(len(self.text))

    def _show_until(self, position: int) -> None:
        stop = self._arguments_end if self._arguments_end >= 0 else position
        fragment = self.text[self._arguments_start + len(self._arguments) : stop]
        self.fragment += fragment
        self._arguments += fragment

    def _scan(self, limit: int) -> int:
        """Go on to ``limit`` or the end of the object, which is returned; -1 while it is open."""
        limit = min(limit, len(self.text))
        if self._depth == 0:
            self._position = min(_SPACE.match(self.text).end(), limit)  # type: ignore[union-attr]
            if self._position == limit:
                return -1
            if self.text[self._position] != "{":
                self.malformed = True
                return -1
        while self._position < limit:
            if self._in_string:
                if not self._skip_string(limit):
                    return -1
                continue
            match = _OUTSIDE_STRING.search(self.text, self._position, limit)
            if match is None:
                self._position = limit
                return -1
            if match[0] == "<":
                self._position, self.malformed = match.start(), True
                return -1
            self._position = match.end()
            self._in_string = match[0] == '"'
            self._depth += (match[0] in "{[") - (match[0] in "}]")
            if self._depth == 1 and match[0] in "}]" and self.streaming and self._arguments_end < 0:
                self._arguments_end = self._position
            if self._depth == 0:
                return self._position
        return -1

    def _skip_string(self, limit: int) -> bool:
        """Move behind the string's closing quote; False when it lies beyond ``limit``."""
        match = _INSIDE_STRING.search(self.text, self._position, limit)
        if match is None:
            self._position = limit
        elif match[0] == '"':
            self._position, self._in_string = match.end(), False
        elif match.end() < len(self.text):
            self._position = match.end() + 1
        else:  # the escaped character has not come yet
            self._position = match.start()
            return False
        return match is not None


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _members(text: str) -> Iterator[tuple[str, int]]:
    """(key, start of its value) of the object in ``text``; ends or raises ValueError where the text is incomplete."""
    position = _skip_space(text, text.index("{") + 1)
    while text[position : position + 1] == '"':
        key, position = _DECODER.raw_decode(text, position)
        start = _skip_space(text, _skip_space(text, position) + 1)
        yield key, start
        _, position = _DECODER.raw_decode(text, start)
        position = _skip_space(text, _skip_space(text, position) + 1)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _parse(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a complete call, None when it is not a valid one."""
    try:
        call: Any = _DECODER.decode(text)
        starts = dict(_members(text))
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return (name, arguments) if is_json_object(arguments) else None
    if not isinstance(arguments, dict | None):
        return None
    if not arguments:
        return name, "{}"
    written = text[starts["arguments"] : _DECODER.raw_decode(text, starts["arguments"])[1]]
    # A raw newline inside a string is read, but it is no JSON to hand on.
    return name, written if is_json_object(written) else json.dumps(arguments)


def _parse_opening(text: str) -> tuple[str, int] | None:
    """(name, where the arguments start) of a call whose arguments object is still open."""
    name: Any = None
    try:
        for key, start in _members(text):
            if key == "name":
                name = _DECODER.raw_decode(text, start)[0]
            elif key == "arguments" and isinstance(name, str) and name:
                return (name, start) if text[start : start + 1] == "{" and not _is_complete(text, start) else None
    except (ValueError, RecursionError):
        pass
    return None


def _is_complete(text: str, start: int) -> bool:
    try:
        _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return False
    return True
