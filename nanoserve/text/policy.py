"""How a request wants the tokens of its answer turned into words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Thinking(Enum):
    """What the start of an answer means to the reasoning split.

    ``OFF``: the whole answer is content. ``AUTO``: the model may open its thoughts with ``<think>``.
    ``OPEN``: the prompt ended inside an open ``<think>``, so the answer starts with thoughts.
    """

    OFF = "off"
    AUTO = "auto"
    OPEN = "open"


class ToolStyle(Enum):
    """How a model writes its calls inside of ``<tool_call>``: as JSON, or as Qwen3-Coder's elements."""

    HERMES = "hermes"
    XML = "xml"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPolicy:
    """The reader's wishes for one answer; the same for all choices of a request.

    ``stop_token_ids`` are the request's own (reported as ``stop_reason``), not the model's EOS ids. ``logprobs``: the
    number of alternatives a token, None when not asked for; ``prompt_logprobs`` likewise for the prompt. ``echo``: the
    prompt's text comes first in the content (and its entries first in the logprobs). ``tool_schemas``: each function's
    properties, which Qwen3-Coder's calls need for the types of their values.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    thinking: Thinking = Thinking.OFF
    parse_tools: bool = False
    tool_style: ToolStyle = ToolStyle.HERMES
    tool_schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    prompt_text: str = ""

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)
