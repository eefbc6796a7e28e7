"""The offline engine: text in, text out, in this process, without Ray. The composition root of text, engine and model.

A call steps the engine until what it asked for is done; calls of several threads take turns.
"""

import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError
from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.core import EngineCore
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.embedding_recipe import EmbeddingRecipe
from nanoserve.text.pooling import PoolingBatch, PoolingOptions, PoolingPreprocessor, relevance
from nanoserve.text.postprocess import ChoiceProcessor, Delta
from nanoserve.text.preprocess import ModelLimits, PreparedRequest, Preprocessor
from nanoserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability, its rank (1 is the most likely; None for an alternative's) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer.

    ``logprobs``: one dict a token, from token id to its Logprob, when asked for. ``seed``: given or drawn; sent again
    it brings the same answer.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """``time.time()`` stamps of one prompt, and how many of its tokens came from the prefix cache."""

    arrival_time: float
    first_token_time: float
    finished_time: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A prompt and its ``n`` answers. ``prompt_logprobs``: None for the first token, then one dict a token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector of length 1."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class Score:
    """How relevant the second text is to the first, from 0 to 1."""

    score: float


Outputs = TypeVar("Outputs", Embedding, Score)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingResult(Generic[Outputs]):
    """The result of one input of ``embed`` or ``score``, in vLLM's shape."""

    request_id: str
    outputs: Outputs
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int


class LLM:
    """Qwen3 in this process.

    ``model``: a checkpoint folder, a hub id, or "demo". ``settings``: the fields of ``EngineArgs``, named as the
    flags of ``nanoserve serve``. Use as a context manager, or call ``shutdown()``.

    Raises:
        ConfigError: a setting is unknown or cannot be met.
        CheckpointError: the checkpoint is incomplete or broken.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        from nanoserve.model.build import build
        from nanoserve.model.folder import resolve_model

        loaded = build(_engine_args(model, settings))
        folder = resolve_model(model)
        scheduler = loaded.scheduler
        self.info = loaded.info
        self._tokenizer = Tokenizer.load(folder)
        self._defaults = GenerationDefaults.load(folder, self._tokenizer.eos_token_id)
        limits = ModelLimits(
            max_model_len=scheduler.max_model_len,
            vocab_size=loaded.info.vocab_size,
            max_kv_tokens=scheduler.num_blocks * scheduler.block_size,
        )
        tasks = loaded.info.tasks
        self._preprocessor = Preprocessor(self._tokenizer, limits, self._defaults, generates="generate" in tasks)
        self._pooling = PoolingPreprocessor(
            self._tokenizer,
            limits,
            tasks=tasks,
            vector_size=loaded.info.hidden_size,
            recipe=EmbeddingRecipe.load(folder),
        )
        self._core = EngineCore(loaded.runner, scheduler, cache_salt=model)
        self._seed = settings.get("seed")
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._closed = False

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json); ``max_tokens`` is vLLM's 16 if it has none."""
        values: dict[str, Any] = dict(self._defaults.sampling)
        return SamplingParams(**values, max_tokens=self._defaults.max_new_tokens or 16)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Continue prompts; results come in their order.

        A prompt is text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}``. One SamplingParams serves
        all prompts, a list gives each its own, None takes the model's defaults.

        Raises:
            InvalidRequestError: a prompt or its settings can never work; nothing was generated.
        """
        listed = _listed(prompts)
        params = self._params_for(sampling_params, len(listed))
        prepared = [
            self._preprocessor.prompt(_prompt(prompt), own, self._request_id())
            for prompt, own in zip(listed, params, strict=True)
        ]
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[GenerationResult]:
        """Answer one conversation or several. The text holds what the model wrote, ``<think>`` included, as in vLLM.

        ``template``: ``tools``, ``chat_template_kwargs``, ``add_generation_prompt``, ``continue_final_message``.

        Raises:
            InvalidRequestError: a conversation can never be answered; nothing was generated.
        """
        many = bool(messages) and _is_list_of(messages, Sequence) and not _is_list_of(messages, str)
        listed: Sequence[Any] = messages if many else [messages]
        for conversation in listed:
            if not _is_list_of(conversation, Mapping):
                raise InvalidRequestError(
                    "`messages` must be a list of messages, or a list of such lists.", param="messages"
                )
        params = self._params_for(sampling_params, len(listed))
        prepared = [
            self._preprocessor.conversation(conversation, own, self._request_id(), split=False, **template)
            for conversation, own in zip(listed, params, strict=True)
        ]
        return self._run(prepared, use_tqdm)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Delta]:
        """One answer as it grows, thoughts (``reasoning``) and ``content`` apart. Leaving the loop aborts it."""
        params = self._params_for(sampling_params, 1)[0]
        prepared = self._preprocessor.conversation(messages, params, self._request_id(), **template)
        request = prepared.choices[0]
        with self._lock:
            yield from self._stream(request, ChoiceProcessor(self._tokenizer, prepared.policy, request))

    def _stream(self, request: GenerateRequest, processor: ChoiceProcessor) -> Iterator[Delta]:
        self._core.add(request)
        try:
            while True:
                for output in self._step():
                    if output.request_id != request.request_id:  # the last word of an earlier, aborted one
                        continue
                    delta = processor.feed(output)
                    if delta.error is not None:
                        raise EngineDeadError(delta.error[1])
                    yield delta
                    if delta.finish_reason is not None:
                        return
        finally:
            self._abort([request.request_id])

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        instruction: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingResult[Embedding]]:
        """Vectors of texts or token ids, as Qwen3-Embedding makes them: the last token's state, scaled to length 1.

        ``instruction`` says what a query is for (documents have none); ``prompt_name`` takes one of the checkpoint's
        own instead. ``dimensions`` cuts the vectors before they are scaled. A prompt too long for the model is an
        error, unless ``truncate_prompt_tokens`` (-1: to what the model takes) cuts its end.

        Raises:
            InvalidRequestError: a prompt or setting can never work; nothing was computed.
        """
        options = PoolingOptions(instruction=instruction, truncate_prompt_tokens=truncate_prompt_tokens)
        inputs = [_prompt(prompt) for prompt in _listed(prompts)]
        batch = self._pooling.embed(inputs, self._request_id(), options, dimensions=dimensions, prompt_name=prompt_name)
        return self._run_pooled(batch, lambda pooled: Embedding(_floats(pooled)), use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingResult[Score]]:
        """How relevant each document (``text_2``) is to its query, as Qwen3-Reranker judges it.

        One query serves all documents, or there are as many queries as documents.

        Raises:
            InvalidRequestError: a text or setting can never work; nothing was computed.
        """
        options = PoolingOptions(instruction=instruction, truncate_prompt_tokens=truncate_prompt_tokens)
        queries, documents = ([text] if isinstance(text, str) else list(text) for text in (text_1, text_2))
        batch = self._pooling.pairs(queries, documents, self._request_id(), options)
        return self._run_pooled(batch, lambda pooled: Score(relevance(pooled)), use_tqdm)

    def shutdown(self) -> None:
        """Give the model's memory back. Idempotent."""
        if not self._closed:
            self._closed = True
            self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _request_id(self) -> str:
        return f"offline-{next(self._numbers)}"

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [self._seeded(given, index) for index in range(count)]
        if not _is_list_of(given, SamplingParams):
            raise InvalidRequestError(
                f"`sampling_params` must be SamplingParams or a list of them. Given: {type(given).__name__}.",
                param="sampling_params",
            )
        if len(given) != count:
            raise InvalidRequestError(
                f"`sampling_params` must be one, or one a prompt ({count}). Given: {len(given)}.",
                param="sampling_params",
            )
        return [self._seeded(params, index) for index, params in enumerate(given)]

    def _seeded(self, params: SamplingParams, index: int) -> SamplingParams:
        """The engine's own ``seed`` makes unseeded requests repeatable: each gets its own, by its place in the call."""
        if self._seed is None or params.seed is not None:
            return params
        return replace(params, seed=(self._seed + index) % 2**64)

    def _run_pooled(
        self, batch: PoolingBatch, read: Callable[[bytes], Outputs], use_tqdm: bool
    ) -> list[PoolingResult[Outputs]]:
        requests = [batch.request(index) for index in range(len(batch.prompts))]
        found: dict[str, RequestOutput] = {}

        def finish(output: RequestOutput) -> bool:
            if output.finish_reason is FinishReason.ERROR:
                raise EngineDeadError(output.error[1] if output.error else "the request failed")
            found[output.request_id] = output
            return output.finish_reason is not None

        self._drive(requests, finish, use_tqdm)
        return [
            PoolingResult(
                request_id=request.request_id,
                outputs=read(found[request.request_id].pooled),
                prompt_token_ids=request.prompt_token_ids,
                num_cached_tokens=found[request.request_id].num_cached_tokens,
            )
            for request in requests
        ]

    def _run(self, prepared: Sequence[PreparedRequest], use_tqdm: bool) -> list[GenerationResult]:
        jobs = [_Job(prompt, self._tokenizer) for prompt in prepared]
        owner = {request.request_id: job for job in jobs for request in job.prepared.choices}
        requests = [request for job in jobs for request in job.prepared.choices]
        self._drive(requests, lambda output: owner[output.request_id].feed(output), use_tqdm)
        return [job.result() for job in jobs]

    def _drive(
        self, requests: Sequence[GenerateRequest], take: Callable[[RequestOutput], bool], use_tqdm: bool
    ) -> None:
        """Step until every request is done; ``take`` reads an output and says whether its request is."""
        with self._lock:
            self._drive_all(requests, take, use_tqdm)

    def _drive_all(
        self, requests: Sequence[GenerateRequest], take: Callable[[RequestOutput], bool], use_tqdm: bool
    ) -> None:
        waiting, running = deque(requests), {request.request_id for request in requests}
        bar = _progress_bar(len(requests), use_tqdm)
        try:
            while running:
                self._feed(waiting)
                for output in self._step():
                    if output.request_id in running and take(output):
                        running.remove(output.request_id)
                        self._abort([output.request_id] if output.finish_reason is None else [])
                        bar.update()
        finally:
            bar.close()
            self._abort(running)

    def _feed(self, waiting: deque[GenerateRequest]) -> None:
        """Hand over as many requests as the engine's bounded queue takes."""
        while waiting:
            try:
                self._core.add(waiting[0])
            except QueueFullError:
                return
            waiting.popleft()

    def _step(self) -> tuple[RequestOutput, ...]:
        if self._closed:
            raise EngineDeadError("This LLM was shut down; make a new one.")
        return self._core.step().outputs

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)


class _Job:
    """One prompt's choices while they grow."""

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self.prepared = prepared
        self._tokenizer = tokenizer
        self._choices = {
            request.request_id: _Choice(ChoiceProcessor(tokenizer, prepared.policy, request))
            for request in prepared.choices
        }
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._first_token_s = 0.0
        self._finished_s = 0.0
        self._num_cached_tokens = 0

    def feed(self, output: RequestOutput) -> bool:
        """Take an output; True when it ends its choice."""
        choice = self._choices[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            raise EngineDeadError(output.error[1] if output.error else "the request failed")
        choice.add(choice.processor.feed(output), output, self._tokenizer)
        if output.request_id == self.prepared.choices[0].request_id:
            self._prompt_logprobs += [_alternatives(entry, self._tokenizer) for entry in output.prompt_logprobs]
            self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.new_token_ids and not self._first_token_s:
            self._first_token_s = time.time()
        self._finished_s = time.time()
        return choice.last.finish_reason is not None

    def result(self) -> GenerationResult:
        prepared = self.prepared
        return GenerationResult(
            request_id=prepared.choices[0].request_id.rsplit("-", 1)[0],
            prompt=prepared.prompt_text,
            prompt_token_ids=prepared.prompt_token_ids,
            prompt_logprobs=None if prepared.policy.prompt_logprobs is None else self._prompt_logprobs,
            outputs=[
                choice.output(index, request)
                for index, (choice, request) in enumerate(zip(self._choices.values(), prepared.choices, strict=True))
            ],
            metrics=RequestMetrics(
                arrival_time=prepared.choices[0].arrival_s,
                first_token_time=self._first_token_s or self._finished_s,
                finished_time=self._finished_s,
                num_cached_tokens=self._num_cached_tokens,
            ),
        )


class _Choice:
    """One answer while it grows."""

    def __init__(self, processor: ChoiceProcessor) -> None:
        self.processor = processor
        self.last = Delta()
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0

    def add(self, delta: Delta, output: RequestOutput, tokenizer: Tokenizer) -> None:
        self.last = delta
        self._text.append(delta.content)
        self._token_ids += delta.new_token_ids
        for entry in output.logprobs[: len(delta.new_token_ids)]:
            self._logprobs.append(_alternatives(entry, tokenizer))
            self._cumulative += entry.logprob

    def output(self, index: int, request: GenerateRequest) -> CompletionOutput:
        scored = request.sampling.logprobs is not None
        assert request.sampling.seed is not None
        return CompletionOutput(
            index=index,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self.last.finish_reason or "abort",
            stop_reason=self.last.stop_reason,
            cumulative_logprob=self._cumulative if scored else None,
            logprobs=self._logprobs if scored else None,
            seed=request.sampling.seed,
        )


def _alternatives(entry: Any, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """vLLM's shape of one position: the chosen token first, then the best ones in order."""
    found = {entry.token_id: Logprob(entry.logprob, entry.rank, tokenizer.decode([entry.token_id]))}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        found.setdefault(token_id, Logprob(logprob, rank, tokenizer.decode([token_id])))
    return found


def _engine_args(model: str, settings: Mapping[str, Any]) -> EngineArgs:
    known = {field.name for field in fields(EngineArgs)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(
            f"LLM() has no setting `{unknown[0]}`; it takes {', '.join(sorted(known))}.", param=unknown[0]
        )
    return EngineArgs(model=model, **settings)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt of any kind, or several, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise _wrong_prompt(prompts)
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _prompt(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, Mapping):
        found = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if found is None:
            raise InvalidRequestError("A prompt mapping holds `prompt` or `prompt_token_ids`.", param="prompt")
        prompt = found
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise _wrong_prompt(prompt)
    return list(prompt)  # type: ignore[arg-type]


def _wrong_prompt(given: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"A prompt must be text, token ids, or a mapping of one of them. Given: {type(given).__name__}.", param="prompt"
    )


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, kind) for item in value)


def _floats(pooled: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(pooled) // 4}f", pooled))


def _progress_bar(total: int, wanted: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="Answers", unit="answer", disable=not wanted, dynamic_ncols=True)
