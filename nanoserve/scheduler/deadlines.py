"""Which requests are late: a heap, so that a step without a late request costs one comparison."""

import heapq

from nanoserve.scheduler.sequence import Sequence


class Deadlines:
    """The deadlines of open sequences, and for a while those of ended ones: a heap cannot forget from its middle.

    Entries hold the arrival number besides the id, for an id may be used again.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def add(self, sequence: Sequence, open_sequences: dict[str, Sequence]) -> None:
        if sequence.request.deadline_s is None:
            return
        if len(self._heap) > 64 + 2 * len(open_sequences):
            self._heap = [entry for entry in self._heap if _find(entry, open_sequences)]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (sequence.request.deadline_s, sequence.rank[1], sequence.request_id))

    def pop_late(self, now_s: float, open_sequences: dict[str, Sequence]) -> list[Sequence]:
        """The open sequences whose deadline lies before ``now_s``; they are forgotten here."""
        late: list[Sequence] = []
        while self._heap and self._heap[0][0] < now_s:
            sequence = _find(heapq.heappop(self._heap), open_sequences)
            if sequence is not None:
                late.append(sequence)
        return late


def _find(entry: tuple[float, int, str], open_sequences: dict[str, Sequence]) -> Sequence | None:
    _, arrival, request_id = entry
    sequence = open_sequences.get(request_id)
    return sequence if sequence is not None and sequence.rank[1] == arrival else None
