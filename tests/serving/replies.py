"""How tests read what comes over the wire: strict JSON, events, and a joined stream."""

import json
from typing import Any

import httpx


def strict_json(text: str | bytes) -> Any:
    """JSON without the NaN and Infinity that Python lets through."""

    def refuse(literal: str) -> object:
        raise ValueError(literal)

    return json.loads(text, parse_constant=refuse)


def events(body: bytes) -> list[Any]:
    """The JSON of each event; every event is one line of valid UTF-8. ``[DONE]`` stays a string."""
    assert body.endswith(b"\n\n"), body[-100:]
    found: list[Any] = []
    for block in body[:-2].split(b"\n\n"):
        line = block.decode("utf-8")
        if line == ": ping":
            continue
        assert line.startswith("data: "), line
        assert "\n" not in line
        data = line.removeprefix("data: ")
        found.append(data if data == "[DONE]" else strict_json(data))
    return found


def refused(response: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """The error object of a refusal, checked for its shape, size and silence about the server's inside."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 8192
    body = strict_json(response.content)
    assert body.keys() >= {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    assert "Traceback" not in response.text
    assert ".py" not in response.text
    if param is not None:
        assert error["param"] == param, error
    return error


def joined_chat(stream: list[Any]) -> list[dict[str, Any]]:
    """The choices that a stream's chunks amount to, reduced to what a plain reply has too (see ``plain_chat``)."""
    assert stream[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream[:-1]:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], _empty_choice(piece["index"]))
            _add_delta(choice["message"], piece["delta"])
            if piece["logprobs"] is not None:
                choice["logprobs"] = (choice["logprobs"] or []) + piece["logprobs"]["content"]
            if piece["finish_reason"] is not None:
                assert choice["finish_reason"] is None, "a second finish reason"
                choice |= {"finish_reason": piece["finish_reason"], "stop_reason": piece["stop_reason"]}
    return [choices[index] for index in sorted(choices)]


def _empty_choice(index: int) -> dict[str, Any]:
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": None, "stop_reason": None}


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    assert not (delta.get("content") and delta.get("reasoning_content")), "words and thoughts in one delta"
    message["content"] += delta.get("content") or ""
    message["reasoning_content"] += delta.get("reasoning_content") or ""
    for piece in delta.get("tool_calls", []):
        if piece["index"] == len(message["tool_calls"]):
            assert piece["type"] == "function"
            assert piece["id"]
            message["tool_calls"].append({"name": piece["function"]["name"], "arguments": ""})
        else:
            assert piece.keys() == {"index", "function"}
        message["tool_calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]


def plain_chat(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a plain reply in the shape of ``joined_chat``."""
    return [
        {
            "index": choice["index"],
            "message": {
                "content": choice["message"]["content"] or "",
                "reasoning_content": choice["message"].get("reasoning_content") or "",
                "tool_calls": [call["function"] for call in choice["message"].get("tool_calls", [])],
            },
            "logprobs": choice["logprobs"] and choice["logprobs"]["content"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in reply["choices"]
    ]


def joined_text(stream: list[Any]) -> list[dict[str, Any]]:
    """The choices that a stream of completions amounts to, in the shape of a plain reply's."""
    assert stream[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream[:-1]:
        for piece in chunk["choices"]:
            empty = {"index": piece["index"], "text": "", "logprobs": None, "finish_reason": None}
            choice = choices.setdefault(piece["index"], empty)
            choice["text"] += piece["text"]
            if piece["logprobs"] is not None:
                before = choice["logprobs"] or {key: [] for key in piece["logprobs"]}
                choice["logprobs"] = {key: before[key] + piece["logprobs"][key] for key in before}
            if piece["finish_reason"] is not None:
                assert choice["finish_reason"] is None, "a second finish reason"
                choice["finish_reason"] = piece["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def plain_text(reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: choice[key] for key in ("index", "text", "logprobs", "finish_reason")} for choice in reply["choices"]]
