"""Response objects of the OpenAI API as plain dicts: no pydantic where a token passes.

Every float that leaves is finite: a log probability of minus infinity is written as ``LOGPROB_FLOOR``.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

LOGPROB_FLOOR = -9999.0
Json = dict[str, object]


class TokenEntry(Protocol):
    """One position with its log probabilities, in words. ``logprob`` is None for the first token of a prompt."""

    @property
    def token(self) -> str: ...
    @property
    def token_id(self) -> int: ...
    @property
    def bytes(self) -> bytes: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> "Sequence[TokenEntry]": ...
    @property
    def text_offset(self) -> int: ...


def envelope(object_: str, id_: str, created: int, model: str, fingerprint: str) -> Json:
    return {"id": id_, "object": object_, "created": created, "model": model, "system_fingerprint": fingerprint}


def usage(prompt_tokens: int, completion_tokens: int, *, cached_tokens: int, reasoning_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def reasoning_member(text: str) -> Json:
    """Both names that clients look for: DeepSeek's and vLLM's ``reasoning_content``, OpenRouter's ``reasoning``."""
    return {"reasoning_content": text, "reasoning": text}


def tool_call(id_: str | None, name: str | None, arguments: str) -> Json:
    """A call with all that is known of it; a later delta of a streamed call brings only arguments."""
    if id_ is None and name is None:
        return {"function": {"arguments": arguments}}
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_logprobs(entries: Sequence[TokenEntry]) -> Json:
    return {"content": chat_entries(entries), "refusal": None}


def chat_entries(entries: Sequence[TokenEntry]) -> list[Json]:
    return [{**_chat_entry(entry), "top_logprobs": [_chat_entry(top) for top in entry.top]} for entry in entries]


def _chat_entry(entry: TokenEntry) -> Json:
    return {"token": entry.token, "logprob": _finite(entry.logprob), "bytes": list(entry.bytes)}


def completion_logprobs(entries: Sequence[TokenEntry]) -> dict[str, list[object]]:
    """Four parallel lists, one item a token; the first token of an echoed prompt has null log probabilities."""
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top_by_text(entry) for entry in entries],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _top_by_text(entry: TokenEntry) -> dict[str, float | None] | None:
    """Two ids may have one text: the better one is kept, and the chosen token always keeps its own value."""
    if entry.logprob is None:
        return None
    tops = {top.token: _finite(top.logprob) for top in reversed(entry.top)}
    return tops | {entry.token: _finite(entry.logprob)}


def prompt_logprobs(entries: Sequence[TokenEntry]) -> list[object]:
    """vLLM's shape: per prompt token null or ``{token id: {logprob, rank, decoded_token}}``, the token itself first.

    ``rank`` is null for a token outside the alternatives asked for.
    """
    return [None if entry.logprob is None else _by_id(entry) for entry in entries]


def _by_id(entry: TokenEntry) -> dict[str, Json]:
    ranks = {top.token_id: rank for rank, top in enumerate(entry.top, start=1)}
    return {
        str(item.token_id): {
            "logprob": _finite(item.logprob),
            "rank": ranks.get(item.token_id),
            "decoded_token": item.token,
        }
        for item in (entry, *entry.top)
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOGPROB_FLOOR)


def model_object(name: str, created: int, max_model_len: int) -> Json:
    card = {"id": name, "object": "model", "created": created, "owned_by": "nanoserve", "root": name, "parent": None}
    return card | {"max_model_len": max_model_len}


def model_list(cards: Sequence[Mapping[str, object]]) -> Json:
    return {"object": "list", "data": list(cards)}
