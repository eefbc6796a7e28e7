"""From the bytes of a request body to a valid model, or one sentence that says what is wrong.

Invariant: whatever the bytes are, the only error that leaves this module is ``InvalidRequestError``.
"""

import json
import math
import re
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from nanoserve.core.errors import InvalidRequestError

Model = TypeVar("Model", bound=BaseModel)
MAX_DEPTH = 96
_UNION_TAGS = ("str", "int", "float", "bool")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_TOO_DEEP = f"The body is nested too deeply: at most {MAX_DEPTH} levels are read."


def parse_body(raw: bytes, model: type[Model]) -> Model:
    """The body as ``model``; fields that the model does not know are its business.

    Raises:
        InvalidRequestError: not UTF-8, not JSON, not an object, too deep, or not valid; ``param`` names the top-level
            field where one is to blame.
    """
    body = _load(raw)
    if not isinstance(body, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_too_deep(raw):
        raise InvalidRequestError(_TOO_DEEP)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _first_error(error) from None
    except RecursionError:
        raise InvalidRequestError(_TOO_DEEP) from None


def _load(raw: bytes) -> object:
    if not raw.strip():
        raise InvalidRequestError("The body is empty; it must be a JSON object.")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _json_error(raw, str(error)) from None


def _json_error(raw: bytes, reason: str) -> InvalidRequestError:
    """Says why strict JSON refused the body. A second, tolerant parse finds the field that holds NaN or a surrogate."""
    try:
        body = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return InvalidRequestError(f"The body is not valid UTF-8 at byte {error.start}.")
    except RecursionError:
        return InvalidRequestError(_TOO_DEEP)
    except ValueError:
        return InvalidRequestError(f"The body is not valid JSON: {reason}.")
    if isinstance(body, dict):
        for field, value in body.items():
            if fault := _unsendable(value):
                return InvalidRequestError(f"`{field}` holds {fault}.", param=field)
    return InvalidRequestError(f"The body is not valid JSON: {reason}.")


def _unsendable(value: object) -> str | None:
    """What tolerant JSON lets through and strict JSON does not; walks without recursion."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return f"{item}, which is not a finite number"
        if isinstance(item, str) and not item.isascii() and any("\ud800" <= char <= "\udfff" for char in item):
            return "a lone surrogate, which is not valid text"
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            stack += item
    return None


def _is_too_deep(raw: bytes) -> bool:
    """Whether valid JSON nests deeper than ``MAX_DEPTH``: peels one level a pass off its brackets, at C speed."""
    brackets = _STRING.sub(b"", raw).translate(_AS_SQUARE, delete=_NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _first_error(error: ValidationError) -> InvalidRequestError:
    """One sentence for the first field that pydantic refused: where, why, and what was given."""
    findings = error.errors(include_url=False, include_context=False)
    first = findings[0]
    path = ".".join(str(part) for part in first["loc"] if str(part) not in _UNION_TAGS and "[" not in str(part))[:200]
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return InvalidRequestError(f"`{path}` is required.", param=param)
    reasons = [finding["msg"] for finding in findings[:4] if finding["loc"][:1] == first["loc"][:1]]
    reason = ", or ".join(dict.fromkeys(text.removeprefix("Value error, ").rstrip(".") for text in reasons))
    return InvalidRequestError(f"`{path}`: {reason}. Given: {_brief(first['input'])}.", param=param)


def _brief(value: object) -> str:
    """At most 120 characters of a value, without printing all of a large one."""
    if isinstance(value, str):
        return repr(value[:100]) + ("..." if len(value) > 100 else "")
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return repr(value)[:120]
