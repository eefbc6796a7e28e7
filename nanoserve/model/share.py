"""Which part of a whole axis (heads, inner features) a rank holds. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """One of ``count`` equal shares; several ranks may hold the same one."""

    index: int = 0
    count: int = 1


WHOLE = Share()
