"""Someone to talk to: a model in this process, or a service over HTTP. Both stream (reasoning, content) pieces."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from nanoserve.core.errors import InvalidRequestError, NanoserveError, UnavailableError

if TYPE_CHECKING:
    import httpx

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Piece:
    """The next few characters of an answer."""

    reasoning: str = ""
    content: str = ""


class Talker(Protocol):
    def stream(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Iterator[Piece]:
        """The answer as it comes; closing the iterator stops it. ``settings``: more fields of OpenAI's chat request."""


class LocalTalker:
    """A model in this process: no Ray, no HTTP. Owns the engine."""

    def __init__(self, **settings: Any) -> None:
        """
        Raises:
            ConfigError, CheckpointError: the model cannot be loaded with these settings, those of ``LLM``.
        """
        from nanoserve.llm import LLM

        self._llm = LLM(**settings)

    def stream(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Iterator[Piece]:
        given = dict(settings)
        template = given.pop("chat_template_kwargs", None)
        params = replace(self._llm.get_default_sampling_params(), **({"max_tokens": None} | given))
        for delta in self._llm.stream_chat(messages, params, chat_template_kwargs=template):
            yield Piece(delta.reasoning, delta.content)


class HttpTalker:
    """A service that speaks OpenAI's protocol."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        """
        Raises:
            UnavailableError: the service cannot be reached, or refuses the key.
        """
        self._client, self._model = connect(url, model, api_key)

    def stream(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Iterator[Piece]:
        import httpx

        body = {"model": self._model, "messages": list(messages), "stream": True} | dict(settings)
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise_for(reply.status_code, reply.read())
                yield from _pieces(reply.iter_lines())
        except httpx.HTTPError as error:
            raise UnavailableError(f"The connection broke: {error}.") from None


def connect(url: str, model: str | None, api_key: str | None) -> "tuple[httpx.Client, str]":
    """A client of the service, and the name of the model to ask for: the given one, or the first that is served.

    Raises:
        UnavailableError: the service cannot be reached, or refuses the key.
    """
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base_url = url.rstrip("/").removesuffix("/v1")
    try:
        client = httpx.Client(base_url=base_url, headers=headers, timeout=httpx.Timeout(10, read=300))
        reply = client.get("/v1/models")
        raise_for(reply.status_code, reply.content)
        return client, model or reply.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(f"{url} cannot be reached: {error}.") from None
    except (ValueError, LookupError, TypeError):
        raise UnavailableError(f"{url} does not answer as an OpenAI-compatible service.") from None


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
    for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise UnavailableError(event["error"]["message"])
        for choice in event["choices"]:
            delta = choice["delta"]
            yield Piece(delta.get("reasoning_content") or "", delta.get("content") or "")
    raise UnavailableError("The answer was cut off.")


def raise_for(status: int, body: bytes) -> None:
    """Raise what a service says is wrong, unless the status is 200."""
    if status == 200:
        return
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"The service answered {status}."
    kind: type[NanoserveError] = InvalidRequestError if 400 <= status < 500 else UnavailableError
    raise kind(message)
