"""Tool calls in the answer (Hermes form: JSON between ``<tool_call>`` and ``</tool_call>``)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """News of one tool call. ``id`` and ``name`` come once, with the first delta of an index."""

    index: int
    id: str | None
    name: str | None
    arguments: str
