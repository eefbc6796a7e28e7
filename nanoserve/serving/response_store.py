"""The responses that this door remembers, for ``previous_response_id`` and references to items: the ones used last, as
many as fit."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response as it was sent, the messages of its conversation up to its end, and the items of its own
    input, each with an id. All three are JSON. ``item_ids``: those of the input and of the output."""

    body: bytes
    conversation: bytes
    input: bytes
    item_ids: tuple[str, ...]

    @classmethod
    def of(
        cls, body: bytes, messages: Sequence[dict[str, Any]], input_: Sequence[dict[str, Any]], output: Sequence[Any]
    ) -> "StoredResponse":
        item_ids = tuple(str(item["id"]) for item in (*input_, *output))
        return cls(body, orjson.dumps(messages), orjson.dumps(input_), item_ids)

    @property
    def messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = orjson.loads(self.conversation)
        return found

    @property
    def input_items(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = orjson.loads(self.input)
        return found

    def item(self, item_id: str) -> dict[str, Any]:
        items: list[dict[str, Any]] = [*self.input_items, *orjson.loads(self.body)["output"]]
        return next(item for item in items if item["id"] == item_id)

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.conversation) + len(self.input) + sum(map(len, self.item_ids))


class ResponseStore:
    """Bounded by count and by bytes; the one that was not used for longest goes first. Lives on one event loop."""

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._response_of_item: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, response: StoredResponse) -> None:
        self._stored[response_id] = response
        self._num_bytes += response.num_bytes
        self._response_of_item |= dict.fromkeys(response.item_ids, response_id)
        while len(self._stored) > self._max_count or self._num_bytes > self._max_bytes:
            self.pop(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        if response_id not in self._stored:
            return None
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def item(self, item_id: str) -> dict[str, Any] | None:
        """The item of this id of the input or output of a response."""
        response = self.get(self._response_of_item.get(item_id, ""))
        return None if response is None else response.item(item_id)

    def pop(self, response_id: str) -> StoredResponse | None:
        response = self._stored.pop(response_id, None)
        if response is not None:
            self._num_bytes -= response.num_bytes
            for item_id in response.item_ids:
                if self._response_of_item.get(item_id) == response_id:
                    del self._response_of_item[item_id]
        return response
