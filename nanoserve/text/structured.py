"""What a request says about the form of its answer: response_format, structured_outputs and vLLM's guided_* fields."""

import json
from collections.abc import Mapping
from typing import Any

from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.sampling import StructuredOutputs
from nanoserve.protocol.openai import GenerationBody

_GUIDED = ("json", "regex", "choice", "grammar")


def answer_form(body: GenerationBody) -> tuple[StructuredOutputs, str] | None:
    """(the form, the request field that asked for it), None for free text.

    Raises:
        InvalidRequestError: the form is unknown or incomplete, or there are several.
    """
    forms = [form for form in (_response_format(body), _structured_outputs(body), _guided(body)) if form is not None]
    if len(forms) > 1:
        fields = " and ".join(f"`{param}`" for _, param in forms)
        raise InvalidRequestError(f"An answer can have one form only. Given: {fields}.", param=forms[1][1])
    return forms[0] if forms else None


def _response_format(body: GenerationBody) -> tuple[StructuredOutputs, str] | None:
    param, value = "response_format", body.response_format
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True), param
    if kind == "structural_tag":
        return StructuredOutputs(tags=_tags(value, param)), param
    if kind != "json_schema":
        raise InvalidRequestError(
            f"`{param}.type` must be text, json_object, json_schema or structural_tag. Given: {kind!r:.100}.",
            param=param,
        )
    wrapper = value.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"`{param}.json_schema.schema` must be a JSON schema.", param=param)
    return StructuredOutputs(json=_json_schema(schema)), param


def _json_schema(schema: object) -> str:
    """The text of a schema; ``true`` means ``{}``, the only one of the two that the grammar library reads."""
    return json.dumps({} if schema is True else schema)


def _structured_outputs(body: GenerationBody) -> tuple[StructuredOutputs, str] | None:
    if body.structured_outputs is None:
        return None
    return _spec(body.structured_outputs, "structured_outputs"), "structured_outputs"


def _guided(body: GenerationBody) -> tuple[StructuredOutputs, str] | None:
    given = {name: value for name in _GUIDED if (value := getattr(body, f"guided_{name}")) is not None}
    if not given:
        return None
    param = f"guided_{next(iter(given))}"
    return _spec(given, param), param


def _tags(value: object, param: str) -> tuple[tuple[str, str, str, str], ...]:
    """vLLM's and SGLang's structural tags: ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    structures, triggers = (value.get("structures"), value.get("triggers")) if isinstance(value, dict) else (None, None)
    if not (isinstance(structures, list) and structures and isinstance(triggers, list)):
        raise InvalidRequestError(f"`{param}`: structural tags need `structures` and `triggers`.", param=param)
    return tuple(_tag(structure, triggers, param) for structure in structures)


def _tag(structure: object, triggers: list[Any], param: str) -> tuple[str, str, str, str]:
    fields = structure if isinstance(structure, dict) else {}
    begin, schema, end = fields.get("begin"), fields.get("schema", {}), fields.get("end", "")
    found = [trigger for trigger in triggers if trigger and isinstance(trigger, str) and str(begin).startswith(trigger)]
    if not (isinstance(begin, str) and isinstance(schema, dict) and isinstance(end, str) and found):
        message = f"`{param}`: a structure needs a `begin` that starts with a trigger, a `schema` and an `end`."
        raise InvalidRequestError(f"{message} Given: {structure!r:.100}.", param=param)
    return found[0], begin, json.dumps(schema), end


def _spec(fields: Mapping[str, Any], param: str) -> StructuredOutputs:
    schema, choice = fields.get("json"), fields.get("choice")
    regex, grammar = fields.get("regex"), fields.get("grammar")
    if schema is not None and not isinstance(schema, str):
        schema = _json_schema(schema)
    if choice is not None and not (isinstance(choice, list) and all(isinstance(item, str) for item in choice)):
        raise InvalidRequestError(f"`{param}`: choice must be a list of strings. Given: {choice!r:.100}.", param=param)
    for name, value in (("regex", regex), ("grammar", grammar)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"`{param}`: {name} must be a string. Given: {value!r:.100}.", param=param)
    return StructuredOutputs(
        json=schema,
        regex=regex,
        choice=None if choice is None else tuple(choice),
        grammar=grammar,
        json_object=bool(fields.get("json_object")),
        tags=None if fields.get("structural_tag") is None else _tags(fields["structural_tag"], param),
    )
