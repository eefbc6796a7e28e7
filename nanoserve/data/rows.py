"""One row of a dataset: what it asks, and the answer in its columns.

"generate": ``messages`` or ``prompt``, and ``sampling_params``, bring ``generated_text`` and its like. "embed":
``prompt`` and ``pooling_params`` bring ``embeddings``. "score": ``query``, ``document`` and ``pooling_params`` bring
``score``.

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
from nanoserve.serving.pooling_route import Run as PoolingRun
from nanoserve.serving.replica import EngineFactory
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.pooling import PoolingBatch, PoolingOptions, PoolingPreprocessor, relevance
from nanoserve.text.preprocess import PreparedRequest

Row = dict[str, Any]
RowFunction = Callable[[Row], Row]

ERROR = "__inference_error__"
"""The column that says why a row has no answer; empty where it has one."""

_PACKED = "nanoserve_row"
_TEMPLATE_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_POOLING_FIELDS = {"instruction": str, "truncate_prompt_tokens": int, "dimensions": int, "prompt_name": str}
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
        tasks = {"generate": self._generated, "embed": self._embedded, "score": self._scored}
        self._do = tasks[config.task_type]

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
        answer = await self._do(await self._host.model(), row)
        return answer | {"time_taken_llm": time.monotonic() - began_s}

    async def _generated(self, model: ServedModel, row: Row) -> Row:
        prepared = prepare(model, row, self._defaults, self._request_id())
        return await self._host.run(lambda: self._generate(model, prepared))

    async def _embedded(self, model: ServedModel, row: Row) -> Row:
        given = _pooling_params(row, *_POOLING_FIELDS)
        own = {name: given.pop(name, None) for name in ("dimensions", "prompt_name")}
        prompt, options = plain(row.get("prompt")), PoolingOptions(**given)
        if not isinstance(prompt, str | list):
            raise InvalidRequestError(f"`prompt` must be a text or token ids. Given: {prompt!r:.100}.", param="prompt")
        batch = _pooling(model).embed([prompt], self._request_id(), options, **own)
        return await self._pooled(model, batch, lambda pooled: {"embeddings": np.frombuffer(pooled, "<f4").tolist()})

    async def _scored(self, model: ServedModel, row: Row) -> Row:
        texts = {name: row.get(name) for name in ("query", "document")}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise InvalidRequestError(f"`{name}` must be a text. Given: {text!r:.100}.", param=name)
        options = PoolingOptions(**_pooling_params(row, "instruction", "truncate_prompt_tokens"))
        queries, documents = ([str(text)] for text in texts.values())
        batch = _pooling(model).pairs(queries, documents, self._request_id(), options, names=("query", "document"))
        return await self._pooled(model, batch, lambda pooled: {"score": relevance(pooled)})

    async def _pooled(self, model: ServedModel, batch: PoolingBatch, read: Callable[[bytes], Row]) -> Row:
        door = await self._host.door()
        results = await self._host.run(lambda: PoolingRun(door, batch, model.name).results(lambda _, raw: read(raw)))
        return results[0] | {"num_input_tokens": batch.num_tokens}

    def _request_id(self) -> str:
        return f"row-{next(self._numbers)}"

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
    params = sampling_params(defaults, _mapping(row, "sampling_params"))
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


def sampling_params(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """What a row asks for, over the defaults.

    Raises:
        InvalidRequestError: an unknown field, or a value out of range.
    """
    values = dict(given)
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


def _mapping(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A column of settings without those that Arrow filled in with None."""
    given = plain(row.get(name))
    if not isinstance(given, dict | None):
        raise InvalidRequestError(f"`{name}` must be a mapping. Given: {given!r:.100}.", param=name)
    return {key: value for key, value in (given or {}).items() if value is not None}


def _pooling(model: ServedModel) -> PoolingPreprocessor:
    if model.pooling is None:
        raise InvalidRequestError("This model makes no embeddings and judges no pairs of texts.", param="model")
    return model.pooling


def _pooling_params(row: Row, *names: str) -> dict[str, Any]:
    given = _mapping(row, "pooling_params")
    for name, value in given.items():
        if name not in names:
            raise InvalidRequestError(f"`pooling_params` has no field {name!r:.100} here.", param="pooling_params")
        if type(value) is not _POOLING_FIELDS[name]:
            kind = _POOLING_FIELDS[name].__name__
            raise InvalidRequestError(f"`{name}` must be of type {kind}. Given: {value!r:.100}.", param=name)
    return given


def plain(value: Any) -> Any:
    """Numpy's arrays and scalars, which Ray puts into rows, as lists and numbers, at any depth."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
