"""A list of sequences in order of rank: the running ones and the waiting queue."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Indexable
from operator import attrgetter

from nanoserve.scheduler.sequence import Sequence

_rank = attrgetter("rank")


class RankedSequences:
    """Sequences by (priority, arrival). Ranks are unique, so one is found by bisection."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    @property
    def items(self) -> Indexable[Sequence]:
        """First to last; to be read only."""
        return self._items

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, sequence.rank, key=_rank)
        assert self._items[index] is sequence, f"{sequence.request_id} is not where its rank says"
        del self._items[index]

    def pop_last(self) -> Sequence:
        return self._items.pop()
