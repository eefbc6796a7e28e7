"""What the cases ask of a running service, and the words that their expectations are written in."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from nanoserve.serving.door import ServedModel
from tests.serving.local_door import LocalDoor
from tests.serving.replies import events, joined_chat, joined_text, plain_chat, plain_text, refused, strict_json

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SAY_IT = [{"role": "user", "content": "say it"}]
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
Reply = dict[str, Any]


@dataclass(frozen=True)
class Service:
    """A client of one service. Everything it reads, it reads as strict JSON."""

    client: httpx.AsyncClient
    door: LocalDoor
    served: ServedModel

    def body(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        start = {"model": self.served.name} | ({"messages": SAY_IT} if path == CHAT else {})
        return start | fields

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        async with asyncio.timeout(60):
            return await self.client.post(path, json=self.body(path, fields))

    async def chat(self, **fields: Any) -> Reply:
        return self._read(await self.post(CHAT, **fields))

    async def text(self, prompt: Any, **fields: Any) -> Reply:
        return self._read(await self.post(TEXT, prompt=prompt, **fields))

    def _read(self, response: httpx.Response) -> Reply:
        assert response.status_code == 200, response.text
        reply: Reply = strict_json(response.content)
        usage = reply["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
        return reply

    async def stream(self, path: str = CHAT, **fields: Any) -> list[Any]:
        response = await self.post(path, stream=True, **fields)
        assert response.status_code == 200, response.text
        return events(response.content)

    async def refuses(self, path: str = CHAT, *, param: str | None = None, **fields: Any) -> dict[str, Any]:
        """A plain 400, with ``stream`` too."""
        refused(await self.post(path, **(fields | {"stream": True})), 400, param)
        fields.pop("stream_options", None)
        return refused(await self.post(path, **fields), 400, param)

    async def same(self, path: str = CHAT, **fields: Any) -> Reply:
        """The plain reply, once the stream to the same body was found to be equal to it."""
        assert fields.get("temperature") == 0 or "seed" in fields, "two samples would differ"
        plain = self._read(await self.post(path, **fields))
        stream = await self.stream(path, **fields, stream_options={"include_usage": True})
        join, flatten = (joined_chat, plain_chat) if path == CHAT else (joined_text, plain_text)
        assert join(stream) == nearly(flatten(plain))
        assert counts(stream[-2]["usage"]) == counts(plain["usage"])
        return plain

    async def canary(self) -> str:
        reply = await self.text([5, 6, 7], max_tokens=4, temperature=0, ignore_eos=True, return_token_ids=True)
        assert (await self.client.get("/health")).status_code == 200
        return str(reply["choices"][0]["token_ids"])

    async def drained(self) -> None:
        """Nothing runs or waits, and every block is free, within five seconds."""
        async with asyncio.timeout(5):
            while not self._is_drained():  # noqa: ASYNC110 (the engine's thread sets what is waited for)
                await asyncio.sleep(0.01)

    def _is_drained(self) -> bool:
        stats = self.door.stats
        return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def nearly(value: Any) -> Any:
    """Equal up to a thousandth in floats: a cached prompt is computed in other shapes than a new one."""
    if isinstance(value, dict):
        return {key: nearly(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nearly(item) for item in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """A usage without its cached tokens, which differ between a first and a second request."""
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def message(reply: Reply, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = reply["choices"][index]["message"]
    return found


def content(reply: Reply, index: int = 0) -> str:
    return message(reply, index)["content"] or ""


def finish(reply: Reply, index: int = 0) -> str:
    reason: str = reply["choices"][index]["finish_reason"]
    return reason


def num_completion_tokens(reply: Reply) -> int:
    number: int = reply["usage"]["completion_tokens"]
    return number
