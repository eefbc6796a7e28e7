"""From a request body to requests for an engine: words to tokens, and every limit judged at the door."""

from dataclasses import dataclass

from nanoserve.core.request import GenerateRequest
from nanoserve.text.policy import OutputPolicy

__all__ = ["ModelLimits", "OutputPolicy", "PreparedRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Counts that bound a request: positions, embedding rows, and tokens that the KV pool can hold."""

    max_model_len: int
    vocab_size: int
    max_kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """One prompt, ready to run: ``choices`` are its ``n`` requests, ids ``f"{request_id}-{index}"``, seeds set.

    ``prompt_text``: the prompt as text, for echo; None for a token-id prompt that nobody wants to read.
    """

    choices: tuple[GenerateRequest, ...]
    prompt_text: str | None
    prompt_token_ids: tuple[int, ...]
    policy: OutputPolicy
