"""What a door knows of its engines, kept so that a choice among a thousand looks at no more than one among sixteen.

Among a few, all are ranked. Among many, those are that can be the best: the engines next to the prompt on a ring of
hashes, those that hold most of it, and the home of its session. That is the power of a few choices (Mitzenmacher 2001),
with choices that every door draws alike, so that doors which know nothing of each other send one prefix to one place.
Where all of these are overloaded, the walk along the ring goes on, as in consistent hashing with bounded loads.
"""

from bisect import bisect, insort
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from nanoserve.routing.kv_index import Hits, KVIndex
from nanoserve.routing.policy import Demand, EngineLoad, load_limit, mark, rank

FEW = 16
"""Engines up to which all are ranked."""

WIDTH = 8
"""Engines that are drawn from the ring, and as many at most of those that hold most of the prompt."""

_POINTS = 16
"""Places of one engine on the ring: with more, the parts of the ring between them are more even."""


class Board:
    """Owns the loads of a door's engines, what they hold (``kv``), and their places on the ring."""

    def __init__(self) -> None:
        self.kv = KVIndex()
        self._loads: dict[str, EngineLoad] = {}
        self._num_requests = 0
        self._ring: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._loads)

    def put(self, load: EngineLoad) -> None:
        """The engine's load is this now; an engine that was not there joins."""
        before = self._loads.get(load.key)
        self._loads[load.key] = load
        self._num_requests += load.num_requests - (before.num_requests if before else 0)
        if before is None:
            for number in range(_POINTS):
                insort(self._ring, (mark(str(number), load.key), load.key))

    def drop(self, key: str) -> None:
        """The engine takes no more requests; what it holds is forgotten by ``kv.forget``. An unknown one is ignored."""
        if (load := self._loads.pop(key, None)) is not None:
            self._num_requests -= load.num_requests
            self._ring = [point for point in self._ring if point[1] != key]

    def choices(self, demand: Demand, hits: Hits) -> Iterator[EngineLoad]:
        """Every engine, best first; ``demand.hit_tokens`` is taken from ``hits``."""
        if demand.session_id and len(self._loads) > FEW:
            demand = replace(demand, home=next(self._around(demand.session_id)))
        limit = load_limit(self._num_requests, len(self._loads))
        overloaded: list[EngineLoad] = []
        for keys in self._groups(demand, hits):
            for load in self._ranked(keys, demand, hits, limit):
                if load.num_requests + 1 > limit:
                    overloaded.append(load)
                else:
                    yield load
        yield from self._ranked([load.key for load in overloaded], demand, hits, limit)

    def _ranked(self, keys: Iterable[str], demand: Demand, hits: Hits, limit: float) -> list[EngineLoad]:
        loads = [self._loads[key] for key in keys]
        known = replace(demand, hit_tokens={load.key: hits.tokens(load.key) for load in loads})
        return rank(loads, known, limit)

    def _groups(self, demand: Demand, hits: Hits) -> Iterator[list[str]]:
        """All engines, each once, in groups to be ranked one after the other."""
        if len(self._loads) <= FEW:
            yield list(self._loads)
            return
        ring = self._around(demand.tie)
        first = dict.fromkeys(islice(ring, WIDTH))
        if demand.home is not None:
            first[demand.home] = None
        first |= dict.fromkeys(key for key in hits.deepest(WIDTH, demand.tie) if key in self._loads)
        yield list(first)
        rest = (key for key in ring if key not in first)
        while group := list(islice(rest, WIDTH)):
            yield group

    def _around(self, word: str) -> Iterator[str]:
        """Every engine once, in the order in which they stand on the ring from the word's place on."""
        place, seen = bisect(self._ring, (mark(word, ""), "")), set[str]()
        for step in range(len(self._ring)):
            key = self._ring[(place + step) % len(self._ring)][1]
            if key not in seen:
                seen.add(key)
                yield key
