"""Structured outputs to a checked grammar: a bad schema, regex or grammar is refused at the door, never by an engine.

The grammar text is llguidance's (https://github.com/guidance-ai/llguidance): compiling takes about a millisecond and
its limits bound what a hostile schema can cost.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.sampling import StructuredOutputs
from nanoserve.text.policy import Thinking

MAX_GRAMMAR_CHARS = 256 * 1024
# Unbounded white space between JSON tokens lets a weak model go on for ever inside a valid document.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n]{0,24}"}


def grammar_text(spec: StructuredOutputs, *, param: str = "structured_outputs") -> str:
    """The grammar of a spec, checked.

    Raises:
        InvalidRequestError: it is malformed, unsupported or too large; ``param`` is the request field to name.
    """
    try:
        return _checked(spec)
    except ValueError as error:
        reason = " ".join(str(error).split())[:500]
        raise InvalidRequestError(f"`{param}` cannot be used as a grammar: {reason}", param=param) from None


def tool_call_grammar(tools: Sequence[Mapping[str, object]], *, param: str = "tools", tag_tokens: bool = False) -> str:
    """The grammar of one Hermes-style call to one of the functions: ``{"name", "parameters"}`` mappings.

    ``tag_tokens``: ``<tool_call>`` and ``</tool_call>`` are tokens, which text in a grammar does not match.

    Raises:
        InvalidRequestError: a function's parameters are not a usable JSON schema.
    """
    opening, closing = ("<tool_call> ", " </tool_call>") if tag_tokens else ('"<tool_call>" ', ' "</tool_call>"')
    calls, rules = [], []
    for index, tool in enumerate(tools):
        head = json.dumps('\n{"name": ' + json.dumps(tool["name"]) + ', "arguments": ')
        calls.append(f'{opening}{head} arguments_{index} "}}\\n"{closing}')
        schema = {"type": "object", **dict(tool.get("parameters") or {})}  # type: ignore[call-overload]
        rules.append(f"arguments_{index}: %json {json.dumps(schema | {'x-guidance': _JSON_OPTIONS})}")
    lark = "start: " + "\n  | ".join(calls) + "\n" + "\n".join(rules) + "\n"
    return grammar_text(StructuredOutputs(grammar=lark), param=param)


def whole_answer(forms: Sequence[str], thinking: Thinking) -> str:
    """The grammar of a whole answer that has one of ``forms``, thoughts before it left free.

    Thoughts are optional where the model opens them itself. Their tags are the tokenizer's own tokens.
    """
    if thinking is Thinking.OFF and len(forms) == 1:
        return forms[0]
    opening = {Thinking.OFF: "", Thinking.AUTO: "(<think> thoughts)?", Thinking.OPEN: "thoughts"}[thinking]
    names = [f"form_{index}" for index in range(len(forms))]
    lark = f"start: {opening} ({' | '.join(f'@{name}' for name in names)})\n"
    if opening:
        lark += "thoughts: /(?s:.*)/ </think> /\\n{0,2}/\n"
    inner = [_embedded(form) | {"name": name} for form, name in zip(forms, names, strict=True)]
    return json.dumps({"grammars": [{"lark_grammar": lark}, *inner]})


def _embedded(grammar: str) -> dict[str, object]:
    """A grammar text as a member of a list of grammars: JSON is such a list already, the rest is Lark."""
    if not grammar.lstrip().startswith("{"):
        return {"lark_grammar": grammar}
    (only,) = json.loads(grammar)["grammars"]
    return dict(only)


@lru_cache(maxsize=256)
def _checked(spec: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    text = _written(spec)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"it is longer than {MAX_GRAMMAR_CHARS} characters")
    if error := LLMatcher.validate_grammar(text):
        raise ValueError(error)
    return text


def _written(spec: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if spec.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if spec.json is not None:
        return LLMatcher.grammar_from_json_schema(spec.json, overrides=_JSON_OPTIONS)
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        if not spec.choice:
            raise ValueError("choice needs at least one answer")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in spec.choice))
    return LLMatcher.grammar_from_lark(spec.grammar or "")
