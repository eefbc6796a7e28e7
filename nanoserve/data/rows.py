"""One row of a dataset: what it asks, and the answer in its columns.

Between the stages a row travels as one column of pickled bytes: Arrow would give all rows the same fields and types,
and a row that is wrong would break its block instead of only itself.
"""

import asyncio
import itertools
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import orjson

from nanoserve.core.errors import InvalidRequestError, NanoserveError
from nanoserve.core.sampling import SamplingParams, StructuredOutputs
from nanoserve.data.config import EngineConfig
from nanoserve.data.engine import EngineHost
from nanoserve.model.folder import resolve_model
from nanoserve.serving.door import ServedModel
from nanoserve.serving.generation import opened
from nanoserve.serving.replica import EngineFactory
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.preprocess import PreparedRequest

Row = dict[str, Any]
RowFunction = Callable[[Row], Row]

ERROR = "__inference_error__"
"""The column that says why a row has no answer; empty where it has one."""

_PACKED = "nanoserve_row"
_TEMPLATE_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


def packing(preprocess: RowFunction | None) -> RowFunction:
    """The first stage's function: all columns, and over them what ``preprocess`` makes of them."""

    def pack(row: Row) -> Row:
        try:
            made = row if preprocess is None else row | preprocess(row)
        except Exception as error:  # the user's own function, on a row that it did not expect
            made = row | {ERROR: f"preprocess: {type(error).__name__}: {error}"}
        return {_PACKED: pickle.dumps(made)}

    return pack


def unpacking(postprocess: RowFunction | None) -> RowFunction:
    """The last stage's function. Rows with an error pass by ``postprocess``, with all that is known of them."""

    def unpack(packed: Row) -> Row:
        row: Row = pickle.loads(packed[_PACKED])
        if row[ERROR] or postprocess is None:
            return row
        try:
            return dict(postprocess(row)) | {ERROR: ""}
        except Exception as error:  # as above
            return row | {ERROR: f"postprocess: {type(error).__name__}: {error}"}

    return unpack


class RowWorker:
    """The engine stage: one of these is an actor. Ray Data runs several calls at once in its event loop."""

    def __init__(self, config: EngineConfig, make_engine: EngineFactory) -> None:
        self._host = EngineHost(config.serving_args(), make_engine, num_siblings=config.pool[1])
        self._defaults = default_params(GenerationDefaults.load(resolve_model(config.model_source)))
        self._numbers = itertools.count()

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = [pickle.loads(packed) for packed in batch[_PACKED]]
        answered = await asyncio.gather(*[self._answered(row) for row in rows])
        return {_PACKED: [pickle.dumps(row) for row in answered]}

    async def _answered(self, row: Row) -> Row:
        if row.get(ERROR):
            return row
        try:
            return row | await self._answer(row) | {ERROR: ""}
        except NanoserveError as error:
            return row | {ERROR: error.message}
        except Exception as error:  # a fault of ours: it costs this row, not the job
            return row | {ERROR: f"{type(error).__name__}: {error}"}

    async def _answer(self, row: Row) -> Row:
        began_s = time.monotonic()
        model = await self._host.model()
        prepared = prepare(model, row, self._defaults, f"row-{next(self._numbers)}")
        answer = await self._host.run(lambda: self._generate(model, prepared))
        return answer | {"time_taken_llm": time.monotonic() - began_s}

    async def _generate(self, model: ServedModel, prepared: PreparedRequest) -> Row:
        text: list[str] = []
        token_ids: list[int] = []
        async with opened(await self._host.door(), model, [prepared]) as choices:
            async for delta in choices[0].deltas():
                text.append(delta.content)
                token_ids += delta.new_token_ids
        return {
            "prompt": prepared.prompt_text,
            "num_input_tokens": len(prepared.prompt_token_ids),
            "generated_text": "".join(text),
            "generated_tokens": token_ids,
            "num_generated_tokens": len(token_ids),
            "finish_reason": delta.finish_reason,
        }


def prepare(model: ServedModel, row: Mapping[str, Any], defaults: SamplingParams, request_id: str) -> PreparedRequest:
    """The request of a row: ``messages`` (with ``tools``, ``chat_template_kwargs`` ...), or ``prompt`` as text or ids.

    ``sampling_params``: ``SamplingParams`` fields; what it leaves open comes from the model, ``max_tokens`` is else 16.
    The text of a chat's answer holds its ``<think>``, as in ``LLM.chat``.

    Raises:
        InvalidRequestError: the row can never be answered.
    """
    messages, prompt = plain(row.get("messages")), plain(row.get("prompt"))
    if (messages is None) == (prompt is None):
        raise InvalidRequestError("A row needs either `messages` or `prompt`.", param="messages")
    params = sampling_params(defaults, plain(row.get("sampling_params")))
    if prompt is not None:
        return model.preprocessor.prompt(prompt, params, request_id)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequestError(f"`messages` must be a list of messages. Given: {messages!r:.100}.", param="messages")
    template = {name: value for name in _TEMPLATE_FIELDS if (value := plain(row.get(name))) is not None}
    return model.preprocessor.conversation(messages, params, request_id, split=False, **template)


def default_params(defaults: GenerationDefaults) -> SamplingParams:
    """The model's own settings; ``max_tokens`` is vLLM's 16 where it has none."""
    values: dict[str, Any] = dict(defaults.sampling)
    return SamplingParams(**values, max_tokens=defaults.max_new_tokens or 16)


def sampling_params(defaults: SamplingParams, given: object) -> SamplingParams:
    """What a row asks for, over the defaults.

    Raises:
        InvalidRequestError: no mapping, an unknown field, or a value out of range.
    """
    if not isinstance(given, dict | None):
        raise InvalidRequestError("`sampling_params` must be a mapping.", param="sampling_params")
    values = {name: value for name, value in (given or {}).items() if value is not None}
    if unknown := sorted(set(values) - _SAMPLING_FIELDS):
        raise InvalidRequestError(f"`sampling_params` has no field {unknown[0]!r:.100}.", param="sampling_params")
    if values.get("n", 1) != 1:
        raise InvalidRequestError(f"`n` must be 1 for a row. Given: {values['n']!r:.100}.", param="n")
    if (form := values.get("structured_outputs")) is not None:
        values["structured_outputs"] = _structured(form)
    try:
        return replace(defaults, **values)
    except TypeError as error:
        raise InvalidRequestError(f"`sampling_params`: {error}.", param="sampling_params") from None


def _structured(form: object) -> StructuredOutputs:
    if isinstance(form, StructuredOutputs):
        return form
    if not isinstance(form, dict):
        raise InvalidRequestError("`structured_outputs` must be a mapping.", param="structured_outputs")
    given = {name: value for name, value in form.items() if value is not None}
    if isinstance(given.get("json"), dict):
        given["json"] = orjson.dumps(given["json"]).decode()
    return StructuredOutputs(**given)


def plain(value: Any) -> Any:
    """Numpy's arrays and scalars, which Ray puts into rows, as lists and numbers, at any depth."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
