"""Which Engine replicas Serve runs, told to the door of this process, and which ones the door still needs addressable.

Serve pickles a request router's module by value, so the router that learns of replicas cannot itself hold the state: it
lives here, one ``Membership`` a deployment, and is asked for inside the router's methods (see ``engine_router``). Serve
may call from a thread of its own; ``bind`` and ``on_change`` belong to the door's loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, Protocol

OnChange = Callable[[frozenset[str]], None]


class Replica(Protocol):
    """What is used of Serve's replica wrapper."""

    @property
    def replica_id(self) -> Any: ...
    @property
    def replica_metadata(self) -> Mapping[str, Any]: ...


class Membership:
    """The last list of replicas, and the wrappers of those that left it but are held."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._listed: dict[str, Replica] = {}
        self._held: dict[str, Replica] = {}
        self._refresh: Callable[[], None] | None = None
        self._door: tuple[asyncio.AbstractEventLoop, OnChange] | None = None

    def bind(self, loop: asyncio.AbstractEventLoop, on_change: OnChange) -> None:
        """The door wants to know: now, and at every change."""
        self._door = (loop, on_change)
        self._tell()

    def replicas_changed(self, replicas: Iterable[Replica], refresh: Callable[[], None]) -> list[Replica]:
        """Serve's new list; returns the held replicas that are no longer on it, to be kept addressable.

        ``refresh`` asks the request router to apply its last list again, from any thread.
        """
        with self._lock:
            self._refresh = refresh
            self._listed = {unique_id(replica): replica for replica in replicas}
            kept = [replica for name, replica in self._held.items() if name not in self._listed]
        self._tell()
        return kept

    def hold(self, name: str) -> bool:
        """Keep the replica addressable after it left the list; False where it already has."""
        with self._lock:
            if (replica := self._listed.get(name)) is None:
                return name in self._held
            self._held[name] = replica
            return True

    def metadata(self, name: str) -> Mapping[str, Any]:
        """What the held replica told Serve of itself.

        Raises:
            ConnectionError: it is not held any more.
        """
        with self._lock:
            if (replica := self._held.get(name)) is None:
                raise ConnectionError(f"replica {name} is not held")
            return replica.replica_metadata

    def release(self, name: str) -> None:
        """The door needs the replica no more."""
        with self._lock:
            gone = self._held.pop(name, None) is not None and name not in self._listed
            refresh = self._refresh
        if gone and refresh is not None:
            refresh()

    def _tell(self) -> None:
        if self._door is not None:
            loop, on_change = self._door
            loop.call_soon_threadsafe(on_change, frozenset(self._listed))


def unique_id(replica: Replica) -> str:
    return str(replica.replica_id.unique_id)


_MEMBERSHIPS: dict[str, Membership] = {}


def engines_of(deployment: str) -> Membership:
    """The replicas of an Engine deployment, as this process knows them."""
    return _MEMBERSHIPS.setdefault(deployment, Membership())
