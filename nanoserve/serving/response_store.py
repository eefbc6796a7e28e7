"""The responses that this door remembers, for ``previous_response_id``: the ones used last, as many as fit."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response as it was sent, and the messages of its conversation up to its end. Both are JSON."""

    body: bytes
    conversation: bytes

    @classmethod
    def of(cls, body: bytes, messages: Sequence[dict[str, Any]]) -> "StoredResponse":
        return cls(body, orjson.dumps(messages))

    @property
    def messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = orjson.loads(self.conversation)
        return found

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.conversation)


class ResponseStore:
    """Bounded by count and by bytes; the one that was not used for longest goes first. Lives on one event loop."""

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, response: StoredResponse) -> None:
        self._stored[response_id] = response
        self._num_bytes += response.num_bytes
        while len(self._stored) > self._max_count or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        if response_id not in self._stored:
            return None
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def pop(self, response_id: str) -> StoredResponse | None:
        response = self._stored.pop(response_id, None)
        self._num_bytes -= 0 if response is None else response.num_bytes
        return response
