"""Tool calls in the form of Qwen3-Coder: ``<function=name>`` around ``<parameter=key>`` elements, values unquoted.

Values have no types of their own; those of the function's JSON schema say what a text stands for.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanoserve.text.stop import partial_suffix

Schemas = Mapping[str, Mapping[str, Any]]
STREAM_AFTER = 512

_SPACE = re.compile(r"\s*")
_HEAD = re.compile(r"<function=([^<>\n]{1,128})>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,128})>\n?")
_CLOSE_VALUE, _CLOSE_CALL = "</parameter>", "</function>"
_MAX_TAG_CHARS = 160
_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),), "array": (list,),
    "object": (dict,),
}  # fmt: skip


def parameter_schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The properties of each function's parameters, by its name."""
    schemas = {}
    for tool in tools:
        properties = (tool["function"].get("parameters") or {}).get("properties")
        schemas[tool["function"]["name"]] = properties if isinstance(properties, dict) else {}
    return schemas


class XmlCall:
    """One call under way: read up to ``</function>``, its arguments written as JSON while they come.

    Satisfies ``tools.CallReader``. A value ends at the ``</parameter>`` that another tag follows, so it may itself hold
    such tags in other places.
    """

    def __init__(self, schemas: Schemas) -> None:
        self.text = ""
        self.malformed = self.complete = self.streaming = self.valid = False
        self.name = ""
        self.fragment = ""
        self.rest = ""
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._position = 0
        self._key: str | None = None
        self._num_keys = 0
        self._certain = 0  # up to where the value under way is known to go on
        self._num_written = -1  # up to where a text value was written; -1: the value is written when it is complete

    def read(self, text: str) -> None:
        """Take in more text. Whether a call is shown early is decided at one character, as in ``tools``."""
        self.text += text
        if not self.streaming:
            self._advance(self.text[:STREAM_AFTER])
            if self.malformed or self.complete or len(self.text) < STREAM_AFTER:
                return
            self.streaming = True
        self._advance(self.text)
        if self.malformed:
            self._end(self._position)

    def flush(self) -> None:
        """The text ends here: what is left of a value is written, without an end."""
        if self._key is not None and self._num_written >= 0:
            self._write(self.text, len(self.text))

    def _advance(self, view: str) -> None:
        """As far as ``view``, the beginning of the text, tells for certain."""
        while not (self.malformed or self.complete):
            moved = self._read_value(view) if self._key is not None else self._read_tag(view)
            if not moved:
                return

    def _read_tag(self, view: str) -> bool:
        start = _space_end(view, self._position)
        if not self.name:
            return self._read_head(view, start)
        if view.startswith(_CLOSE_CALL, start):
            self.fragment += "}"
            self.valid = True
            self._end(start + len(_CLOSE_CALL))
            return True
        match = _PARAMETER.match(view, start)
        if match is None or (match.end() == len(view) and view[-1] == ">"):  # a newline may follow
            self.malformed = match is None and not _may_begin(view[start:], "<parameter=", _CLOSE_CALL)
            return False
        self._open_value(match[1].strip(), match.end())
        return True

    def _read_head(self, view: str, start: int) -> bool:
        match = _HEAD.match(view, start)
        if match is None:
            self.malformed = not _may_begin(view[start:], "<function=")
            return False
        self.name = match[1].strip()
        self._properties = self._schemas.get(self.name, {})
        self._position = match.end()
        self.fragment = "{"
        return True

    def _open_value(self, key: str, position: int) -> None:
        self.fragment += f"{', ' if self._num_keys else ''}{_json(key)}: "
        self._num_keys += 1
        self._key, self._position, self._certain = key, position, position
        self._num_written = -1
        if _kinds(self._properties.get(key)) <= {"string"}:
            self.fragment += '"'
            self._num_written = position

    def _read_value(self, view: str) -> bool:
        self._certain, after = _value_end(view, self._certain)
        end = _without_newline(view, self._position, self._certain)
        is_text = self._num_written >= 0
        if is_text:
            self._write(view, end)
        if after is None:
            return False
        value = self._properties.get(self._key or "")
        self.fragment += '"' if is_text else _json(typed(view[self._position : end], value))
        self._key, self._position = None, after
        return True

    def _write(self, view: str, end: int) -> None:
        """The part of a text value up to ``end`` that was not written yet."""
        if end > self._num_written:
            self.fragment += _json(view[self._num_written : end])[1:-1]
            self._num_written = end

    def _end(self, position: int) -> None:
        self.complete, self.malformed = True, False
        self.rest = self.text[position:]


def _value_end(view: str, start: int) -> tuple[int, int | None]:
    """(up to where the value is certain to go on, where its closing tag ends); the second is None while it is open."""
    search = start
    while (found := view.find(_CLOSE_VALUE, search)) >= 0:
        after = found + len(_CLOSE_VALUE)
        follows = view[_space_end(view, after) :][:_MAX_TAG_CHARS]
        if follows.startswith(("<parameter=", _CLOSE_CALL)):
            return found, after
        if _may_begin(follows, "<parameter=", _CLOSE_CALL):
            return found, None
        search = after
    tail = view[max(search, len(view) - len(_CLOSE_VALUE)) :]
    return len(view) - partial_suffix(tail, _CLOSE_VALUE), None


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _without_newline(view: str, start: int, end: int) -> int:
    """The template puts a newline before the closing tag."""
    return end - 1 if end > start and view[end - 1] == "\n" else end


def _space_end(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _may_begin(text: str, *tags: str) -> bool:
    """Whether more text may still make it begin with one of the tags, the open ones up to their ``>``."""
    if any(tag.startswith(text) for tag in tags):
        return True
    is_open = any(tag.endswith("=") and text.startswith(tag) for tag in tags)
    return is_open and len(text) < _MAX_TAG_CHARS and not set(text[1:]) & set("<>\n")


def typed(text: str, schema: object) -> Any:
    """What a value's text stands for under its schema; the text itself where it is none of the types allowed."""
    kinds = _kinds(schema)
    lowered = text.strip().lower()
    if "boolean" in kinds and lowered in ("true", "false"):
        return lowered == "true"
    if "null" in kinds and lowered in ("null", "none"):
        return None
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = any(_is_of(value, kind) for kind in kinds if kind in _TYPES)
    return value if fits else text


def _is_of(value: object, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _refuse(constant: str) -> object:
    raise ValueError(constant)


def _kinds(schema: object) -> set[str]:
    """The JSON types that a schema allows; none of them told means text."""
    if not isinstance(schema, Mapping):
        return set()
    kinds: set[str] = set()
    type_ = schema.get("type")
    kinds |= {kind for kind in (type_ if isinstance(type_, list) else [type_]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        for option in _list(schema.get(name)):
            kinds |= _kinds(option)
    for value in _list(schema.get("enum")):
        kinds |= {kind for kind in _TYPES if _is_of(value, kind)} or {"string"}
    return kinds


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
