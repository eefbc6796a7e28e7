"""Structured outputs to a checked grammar: a bad schema, regex or grammar is refused at the door, never by an engine.

The grammar text is llguidance's (https://github.com/guidance-ai/llguidance). Compiling usually takes a millisecond, but
some forms take time that is quadratic in their size or worse: sizes are bounded here, time and depth by the sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.sampling import StructuredOutputs
from nanoserve.text.grammar_sandbox import GrammarSandbox
from nanoserve.text.policy import Thinking

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_WRITTEN_CHARS = 32 * 1024  # of a regex or grammar that a client wrote
MAX_MEMBERS = 1000
# Unbounded white space between JSON tokens lets a weak model go on for ever inside a valid document.
_LIBRARY_KEYWORD = "x-guidance"  # where clients wrote it themselves it could switch the checks of the library off
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n]{0,24}"}
_sandbox = GrammarSandbox()


@dataclass(frozen=True, slots=True)
class _Verdict:
    """``fault``: why ``text`` is no usable grammar; None when it is one."""

    text: str
    fault: str | None = None


def grammar_text(spec: StructuredOutputs, *, param: str = "structured_outputs") -> str:
    """The grammar of a spec, checked.

    Raises:
        InvalidRequestError: it is malformed, unsupported or too large; ``param`` is the request field to name.
    """
    return _accepted(_judged(spec), param)


def _accepted(verdict: _Verdict, param: str) -> str:
    if verdict.fault is not None:
        reason = " ".join(verdict.fault.removeprefix("panic: ").split())[:500]
        raise InvalidRequestError(f"`{param}` cannot be used as a grammar: {reason}", param=param)
    return verdict.text


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
        rules.append(f"arguments_{index}: %json {json.dumps(schema | {_LIBRARY_KEYWORD: _JSON_OPTIONS})}")
    lark = "start: " + "\n  | ".join(calls) + "\n" + "\n".join(rules) + "\n"
    return _calls(lark, tools, param)


def xml_call_grammar(tools: Sequence[Mapping[str, object]], *, param: str = "tools", tag_tokens: bool = False) -> str:
    """The grammar of one call in Qwen3-Coder's form; the arguments are as in ``tool_call_grammar``.

    Parameters come in the schema's order; a text value is anything up to its closing tag.

    Raises:
        InvalidRequestError: a function's parameters are not a usable JSON schema.
    """
    opening, closing = ("<tool_call> ", " </tool_call>") if tag_tokens else ('"<tool_call>" ', ' "</tool_call>"')
    calls, rules = [], ['text_value[suffix="\\n</parameter>\\n"]: /(?s:.*)/']
    for index, tool in enumerate(tools):
        schema: Mapping[str, Any] = dict(tool.get("parameters") or {})  # type: ignore[call-overload]
        elements = []
        for number, (name, value) in enumerate(_properties(schema, param).items()):
            rule = f"parameter_{index}_{number}"
            elements.append(rule if name in _list(schema.get("required")) else f"{rule}?")
            rules.append(f"{rule}: {json.dumps(f'<parameter={name}>' + chr(10))} {_xml_value(value, schema)}")
        head, tail = json.dumps(f"\n<function={tool['name']}>\n"), json.dumps("</function>\n")
        calls.append(f"{opening}{head} {' '.join(elements)} {tail}{closing}")
    lark = "start: " + "\n  | ".join(calls) + "\n" + "\n".join(rules) + "\n"
    return _calls(lark, tools, param)


def _calls(lark: str, tools: Sequence[Mapping[str, object]], param: str) -> str:
    return _accepted(_judged_calls(lark, json.dumps([tool.get("parameters") for tool in tools])), param)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _properties(schema: Mapping[str, Any], param: str) -> Mapping[str, Mapping[str, Any]]:
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict) or not all(isinstance(value, dict) for value in properties.values()):
        raise InvalidRequestError(f"`{param}`: `properties` must map names to JSON schemas.", param=param)
    return properties


def _xml_value(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A value and its closing tag: text as it is, all else as JSON, with the definitions that it may refer to."""
    closing = json.dumps("\n</parameter>\n")
    texts = value.get("enum")
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return f"({' | '.join(map(json.dumps, texts))}) {closing}"
    if value.get("type", "string") == "string" and "$ref" not in value and "anyOf" not in value:
        return "text_value"
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return f"%json {json.dumps({**value, **shared, _LIBRARY_KEYWORD: _JSON_OPTIONS})} {closing}"


def strict_calls(call: str) -> str:
    """The grammar of free text in which whatever begins a call is one of ``call``, which must begin with a token."""
    return "start: (text | call)*\ntext: /(?s:.+)/\n" + call.replace("start: ", "call: ", 1)


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


@lru_cache(maxsize=64)
def _judged(spec: StructuredOutputs) -> _Verdict:
    """A grammar and its fault; the faults are remembered too, for finding them may take seconds."""
    if max(len(spec.grammar or ""), len(spec.regex or "")) > MAX_WRITTEN_CHARS:
        return _Verdict("", f"it is longer than {MAX_WRITTEN_CHARS} characters")
    try:
        text = _written(spec)
        schemas = [json.loads(schema) for schema in ([spec.json] if spec.json else [tag[2] for tag in spec.tags or ()])]
    except (ValueError, RecursionError) as error:
        return _Verdict("", str(error))
    return _Verdict(text, _fault(text, schemas))


@lru_cache(maxsize=64)
def _judged_calls(lark: str, schemas: str) -> _Verdict:
    """The same of a grammar that was made here; ``schemas``: the JSON of those that it holds."""
    from llguidance import LLMatcher

    text = LLMatcher.grammar_from_lark(lark)
    return _Verdict(text, _fault(text, json.loads(schemas)))


def _fault(text: str, schemas: Sequence[object]) -> str | None:
    if len(text) > MAX_GRAMMAR_CHARS:
        return f"it is longer than {MAX_GRAMMAR_CHARS} characters"
    for schema in schemas:
        width, names = _survey(schema)
        if width > MAX_MEMBERS:
            return f"it has more than {MAX_MEMBERS} properties or other members of one kind in one place"
        if _LIBRARY_KEYWORD in names:
            return f"{_LIBRARY_KEYWORD!r} is no keyword of JSON schemas"
    return _sandbox.fault(text)


def _survey(schema: object) -> tuple[int, set[str]]:
    """(the most members of an object or list in a schema, all names), values left out; walks without recursion."""
    width, names, stack = 0, set[str](), [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            width = max(width, len(value))
            names |= value.keys()
            stack += [member for name, member in value.items() if name not in ("enum", "const")]
        elif isinstance(value, list):
            width = max(width, len(value))
            stack += value
    return width, names


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
    if spec.tags is not None:
        return LLMatcher.grammar_from_lark(_tags_grammar(spec.tags))
    return LLMatcher.grammar_from_lark(_lark(spec.grammar or ""))


def _lark(grammar: str) -> str:
    """A grammar in Lark's notation; one in llama.cpp's, as vLLM takes it (``root ::= ...``), is rewritten."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # the rewriter's own error is one, and so is what it raises where no rule is the root
        raise ValueError(str(error)) from None


def _tags_grammar(tags: Sequence[tuple[str, str, str, str]]) -> str:
    """Free text in which each trigger binds what follows, up to the end of its tag."""
    rules = ["start: (" + " | ".join(f"tag_{index}" for index in range(len(tags))) + ")* TEXT", "TEXT: /(?s:.*)/"]
    for index, (trigger, begin, schema, end) in enumerate(tags):
        rest, closing = (json.dumps(text) if text else "" for text in (begin[len(trigger) :], end))
        rules.append(f"trigger_{index}[lazy]: TEXT {json.dumps(trigger)}")
        options = {_LIBRARY_KEYWORD: _JSON_OPTIONS}
        rules.append(f"tag_{index}: trigger_{index} {rest} %json {json.dumps(json.loads(schema) | options)} {closing}")
    return "\n".join(rules) + "\n"
