"""From an engine's tokens to the words that a reader sees, one choice at a time."""

from dataclasses import dataclass

from nanoserve.text.logprobs import TokenText
from nanoserve.text.tools import ToolCallDelta

__all__ = ["Delta", "TokenText", "ToolCallDelta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one ``RequestOutput`` adds to the answer. Joined over all deltas, it does not depend on their grouping.

    A delta may hold reasoning, content and tool calls together, in this order: a stream writes them as separate chunks.
    With ``echo``, the first delta's content starts with the prompt and its ``logprobs`` with the prompt's entries.
    ``finish_reason``: "stop", "length", "tool_calls", "abort" or "error", on the last delta only. ``stopped_by_text``:
    a stop string ended the answer here, the engine does not know yet and must be told to abort.
    ``num_completion_tokens`` and ``num_cached_tokens`` are totals so far.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenText, ...] = ()
    prompt_logprobs: tuple[TokenText, ...] = ()
    new_token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: tuple[str, str] | None = None
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    stopped_by_text: bool = False
