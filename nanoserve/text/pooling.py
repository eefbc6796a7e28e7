"""Texts for requests that generate nothing: inputs to embed, and (query, document) pairs to judge, as tokens.

A pair is put to the model as Qwen3-Reranker was trained: a system and a user turn around it, an empty thought, and then
the answer, "yes" or "no". Whatever users send in a pair is plain text: the name of a special token in a document cannot
end the user's turn and answer in the model's place.
"""

import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.pooling import NO_SAMPLING, PoolingKind, PoolingParams
from nanoserve.core.request import GenerateRequest
from nanoserve.protocol.pooling import EmbeddingRequest, PoolingBody, RerankRequest, ScoreRequest
from nanoserve.text.embedding_recipe import EmbeddingRecipe
from nanoserve.text.messages import check_unicode
from nanoserve.text.prompts import ModelLimits, PromptReader
from nanoserve.text.tokenizer import Tokenizer

MAX_INPUTS = 2048  # OpenAI's bound of one embeddings request
MAX_INSTRUCTION_CHARS = 4096  # it is repeated for each input
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The wording around a pair, and around an instructed query, is Qwen3-Reranker's and Qwen3-Embedding's (model cards).
_TURN_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_TURN_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PoolingPrompt(NamedTuple):
    """The tokens of one input in two parts, so that two thousand documents can share the tokens of one long query."""

    head: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.head) + len(self.tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """What a caller may say about a call. ``truncate_prompt_tokens``: None refuses what is too long, -1 cuts to fit."""

    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingBatch:
    """The judged inputs of one call. ``request`` makes the engine's request of one when its turn comes."""

    request_id: str
    prompts: Sequence[PoolingPrompt]
    params: PoolingParams
    options: PoolingOptions
    arrival_s: float = field(default_factory=time.time)

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    def request(self, index: int) -> GenerateRequest:
        head, tail = self.prompts[index]
        return GenerateRequest(
            request_id=f"{self.request_id}-{index}",
            prompt_token_ids=head + tail,
            sampling=NO_SAMPLING,
            pooling=self.params,
            priority=self.options.priority,
            arrival_s=self.arrival_s,
            cache_salt=self.options.cache_salt,
        )


def relevance(pooled: bytes) -> float:
    """The probability of "yes" against "no" from both logits, or a classifier's from its one."""
    logits = struct.unpack(f"<{len(pooled) // 4}f", pooled)
    margin = logits[0] - logits[1] if len(logits) == 2 else logits[0]
    return 1 / (1 + math.exp(-margin)) if margin >= 0 else math.exp(margin) / (1 + math.exp(margin))


class PoolingPreprocessor:
    """One model's door for these calls. Stateless.

    ``tasks``: what the network can do. ``vector_size``: numbers of a whole embedding. The methods raise
    InvalidRequestError for whatever can never work, with ``param`` naming the field, and tokenize: milliseconds a page.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        *,
        tasks: Sequence[str],
        vector_size: int,
        recipe: EmbeddingRecipe,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = limits.max_tokens
        self._reader = PromptReader(tokenizer, limits)
        self._tasks = tasks
        self._vector_size = vector_size
        self._recipe = recipe
        self._closing = _closing_tokens(tokenizer)
        self._start = tuple(tokenizer.encode(_TURN_START, allow_special=True, add_special_tokens=False))
        self._end = tuple(tokenizer.encode(_TURN_END, allow_special=True, add_special_tokens=False))

    # Bodies

    def embeddings(self, body: EmbeddingRequest, request_id: str) -> PoolingBatch:
        if body.encoding_format not in (None, "float", "base64"):
            raise InvalidRequestError(
                f"`encoding_format` must be 'float' or 'base64'. Given: {body.encoding_format!r:.100}.",
                param="encoding_format",
            )
        return self.embed(
            body.input, request_id, _options(body), dimensions=body.dimensions, prompt_name=body.prompt_name
        )

    def rerank(self, body: RerankRequest, request_id: str) -> tuple[PoolingBatch, list[str]]:
        """The pairs, and the documents as texts."""
        if body.top_n is not None and body.top_n < 0:
            raise InvalidRequestError(f"`top_n` must be >= 0. Given: {body.top_n}.", param="top_n")
        documents = [_document(item, f"documents[{index}]") for index, item in enumerate(body.documents[:MAX_INPUTS])]
        _check_count(len(body.documents), "documents")
        return self.pairs([body.query], documents, request_id, _options(body), names=("query", "documents")), documents

    def score(self, body: ScoreRequest, request_id: str) -> PoolingBatch:
        first, second = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
        return self.pairs(first, second, request_id, _options(body), names=("text_1", "text_2"))

    # Calls

    def embed(
        self,
        inputs: object,
        request_id: str,
        options: PoolingOptions,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> PoolingBatch:
        """``inputs``: a text, token ids, or a list of either."""
        self._need("embed", "makes no embeddings")
        if self._recipe.obstacle is not None:
            raise InvalidRequestError(f"This model makes no embeddings here: {self._recipe.obstacle}.", param="model")
        if dimensions is not None and not 1 <= dimensions <= self._vector_size:
            raise InvalidRequestError(
                f"`dimensions` must be in [1, {self._vector_size}]. Given: {dimensions}.", param="dimensions"
            )
        many = isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], str | list)
        items: list[object] = inputs if many else [inputs]  # type: ignore[assignment]
        _check_count(len(items), "input")
        intro = self._intro(options.instruction, prompt_name)
        limit = self._limit(options)
        names = [f"input[{index}]" for index in range(len(items))] if many else ["input"]
        prompts = [self._input(item, name, intro, limit) for item, name in zip(items, names, strict=True)]
        params = PoolingParams(kind=PoolingKind.EMBED, dimensions=dimensions)
        return PoolingBatch(request_id=request_id, prompts=prompts, params=params, options=options)

    def pairs(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        request_id: str,
        options: PoolingOptions,
        *,
        names: tuple[str, str] = ("text_1", "text_2"),
    ) -> PoolingBatch:
        """One query against every document, or as many queries as documents in pairs."""
        self._need("score", "judges no pairs of texts")
        for texts, name in ((queries, names[0]), (documents, names[1])):
            _check_count(len(texts), name)
            check_unicode(list(texts), name)
        if len(queries) not in (1, len(documents)):
            raise InvalidRequestError(
                f"`{names[0]}` must hold one text, or one for each of the {len(documents)} in `{names[1]}`."
                f" Given: {len(queries)}.",
                param=names[0],
            )
        limit = self._limit(options)
        heads = [self._head(query, names[0], options.instruction, limit) for query in queries]
        if len(heads) == 1:
            heads *= len(documents)
        prompts = [self._pair(head, text, names[1], limit) for head, text in zip(heads, documents, strict=True)]
        params = PoolingParams(kind=PoolingKind.SCORE, token_ids=self._answers())
        return PoolingBatch(request_id=request_id, prompts=prompts, params=params, options=options)

    # Parts

    def _need(self, task: str, lack: str) -> None:
        if task not in self._tasks:
            raise InvalidRequestError(f"This model {lack}; it can: {', '.join(self._tasks)}.", param="model")

    def _answers(self) -> tuple[int, ...]:
        """The tokens whose logits are compared; a classifier has one label instead."""
        if "generate" not in self._tasks:
            return (0,)
        ids = [self._tokenizer.encode(answer, allow_special=False) for answer in ("yes", "no")]
        if any(len(tokens) != 1 for tokens in ids):
            raise InvalidRequestError(
                "This model judges no pairs of texts: its tokenizer has no token for each of 'yes' and 'no'.",
                param="model",
            )
        return ids[0][0], ids[1][0]

    def _limit(self, options: PoolingOptions) -> int | None:
        """Tokens to cut to; None where nothing may be cut."""
        limit = options.truncate_prompt_tokens
        if limit is not None and limit != -1 and not 1 <= limit <= self._max_tokens:
            raise InvalidRequestError(
                f"`truncate_prompt_tokens` must be -1 or in [1, {self._max_tokens}]. Given: {limit}.",
                param="truncate_prompt_tokens",
            )
        return self._max_tokens if limit == -1 else limit

    def _intro(self, instruction: str | None, prompt_name: str | None) -> str:
        """What goes before each text."""
        if instruction is not None:
            if prompt_name is not None:
                raise InvalidRequestError(
                    "Only one of `instruction` and `prompt_name` may be given.", param="instruction"
                )
            return f"Instruct: {_checked_instruction(instruction)}\nQuery:"
        name = self._recipe.default_prompt_name if prompt_name is None else prompt_name
        if name is not None and name not in self._recipe.prompts:
            known = ", ".join(self._recipe.prompts) or "none"
            raise InvalidRequestError(
                f"`prompt_name` must be one of this model's prompts ({known}). Given: {name!r:.100}.",
                param="prompt_name",
            )
        return "" if name is None else self._recipe.prompts[name]

    def _input(self, item: object, name: str, intro: str, limit: int | None) -> PoolingPrompt:
        if not isinstance(item, str | list):
            raise InvalidRequestError(f"`{name}` must be a text or token ids. Given: {item!r:.100}.", param="input")
        if not item:
            raise InvalidRequestError(f"`{name}` must not be empty.", param="input")
        if isinstance(item, list):
            if intro:
                raise InvalidRequestError(f"`{name}` is token ids, before which no text can go.", param="input")
            if limit is None:
                self._check_length(len(item), name)
            return PoolingPrompt((), self._reader.checked_ids(item[:limit], "input"))
        check_unicode(item, "input")
        if limit is None:
            self._reader.check_chars(item, "input")
        token_ids = tuple(self._tokenizer.encode(intro + item, allow_special=True))
        if limit is None:
            self._check_length(len(token_ids), name)
        elif len(token_ids) > limit:
            token_ids = (*token_ids[: max(0, limit - len(self._closing))], *self._closing)[-limit:]
        return PoolingPrompt((), token_ids)

    def _head(self, query: str, name: str, instruction: str | None, limit: int | None) -> tuple[int, ...]:
        """A pair's tokens up to its document.

        Cut in the middle of ``<Document>``: there Qwen's pre-tokenizer cuts too, so nothing changes by it.
        """
        if not query:
            raise InvalidRequestError(f"`{name}` must not be empty.", param=name)
        self._reader.check_chars(query, name)
        asked = DEFAULT_INSTRUCTION if instruction is None else _checked_instruction(instruction)
        text = f"<Instruct>: {asked}\n<Query>: {query}\n<Document"
        head = self._start + tuple(self._tokenizer.encode(text, allow_special=False))
        room = (self._max_tokens if limit is None else limit) - len(head) - len(self._end)
        if room < 2:
            raise InvalidRequestError(
                f"`{name}` has {len(head)} tokens with what goes around it, which leaves no room for a document.",
                param=name,
                code="context_length_exceeded",
            )
        return head

    def _pair(self, head: tuple[int, ...], document: str, name: str, limit: int | None) -> PoolingPrompt:
        if limit is None:
            self._reader.check_chars(document, name)
        tail = tuple(self._tokenizer.encode(f">: {document}", allow_special=False))
        if limit is None:
            self._check_length(len(head) + len(tail) + len(self._end), name)
        else:
            tail = tail[: limit - len(head) - len(self._end)]
        return PoolingPrompt(head, tail + self._end)

    def _check_length(self, num_tokens: int, name: str) -> None:
        if num_tokens > self._max_tokens:
            raise InvalidRequestError(
                f"`{name}` has {num_tokens} tokens, but this model takes {self._max_tokens} at most;"
                " shorten it, or let `truncate_prompt_tokens` cut it.",
                param=name.partition("[")[0],
                code="context_length_exceeded",
            )


def _options(body: PoolingBody) -> PoolingOptions:
    return PoolingOptions(
        instruction=body.instruction,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def _check_count(count: int, name: str) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequestError(f"`{name}` must hold 1 to {MAX_INPUTS} items. Given: {count}.", param=name)


def _checked_instruction(instruction: str) -> str:
    check_unicode(instruction, "instruction")
    if len(instruction) > MAX_INSTRUCTION_CHARS:
        raise InvalidRequestError(
            f"`instruction` may have {MAX_INSTRUCTION_CHARS} characters at most. Given: {len(instruction)}.",
            param="instruction",
        )
    return instruction


def _texts(value: object, name: str) -> list[str]:
    items = value if isinstance(value, list) else [value]
    _check_count(len(items), name)
    return [_document(item, f"{name}[{index}]") for index, item in enumerate(items)]


def _document(item: object, name: str) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"`{name}` must be a text, or an object with a `text`. Given: {item!r:.100}.", param=name.partition("[")[0]
        )
    return text


def _closing_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts behind a text of its own accord: Qwen3-Embedding's <|endoftext|>, which is pooled."""
    plain = tokenizer.encode("a", allow_special=True, add_special_tokens=False)
    full = tokenizer.encode("a", allow_special=True)
    places = (place for place in range(len(full)) if full[place : place + len(plain)] == plain)
    return tuple(full[next(places, len(full)) + len(plain) :])
