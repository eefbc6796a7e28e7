"""Bodies as real clients send them are accepted; wrong types are refused by name."""

import json
from typing import Any, TypeVar

import pytest

from nanoserve.core.errors import InvalidRequestError
from nanoserve.protocol.body import parse_body
from nanoserve.protocol.openai import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, RequestBody

Model = TypeVar("Model", bound=RequestBody)

HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def sent(model: type[Model], body: object) -> Model:
    return parse_body(json.dumps(body).encode(), model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", True), ("max_tokens", "5"), ("max_tokens", 1.5), ("n", True),
        ("stream", "yes"), ("stop", 7), ("logit_bias", {"1": "x"}), ("logit_bias", [1]), ("messages", "hi"),
        ("messages", None), ("messages", [1]), ("tools", {"a": 1}), ("tools", ["x"]), ("tool_choice", 1),
        ("chat_template_kwargs", "no"), ("seed", 1.5), ("top_logprobs", "2"), ("response_format", "json"),
        ("stream_options", True), ("logprobs", 3),
    ],
)  # fmt: skip
def test_a_wrong_type_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sent(ChatCompletionRequest, HI | {field: value})
    assert caught.value.param == field
    assert field in caught.value.message
    assert "\n" not in caught.value.message
    caught.value.message.encode()


@pytest.mark.parametrize("body", [[], "x", None, 7])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(InvalidRequestError, match="JSON object"):
        sent(ChatCompletionRequest, body)


def test_a_missing_field_is_named() -> None:
    for model, name in (
        (ChatCompletionRequest, "messages"),
        (CompletionRequest, "prompt"),
        (DetokenizeRequest, "tokens"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            sent(model, {"model": "m"})
        assert caught.value.param == name


def test_null_is_like_leaving_out() -> None:
    names = [name for name in ChatCompletionRequest.model_fields if name not in ("messages", "model")]
    assert sent(ChatCompletionRequest, HI | dict.fromkeys(names)) == sent(ChatCompletionRequest, HI)


def test_unknown_fields_and_any_user_are_accepted() -> None:
    extra = {
        "some_future_field": {"x": 1},
        "store": False,
        "metadata": {"k": "v"},
        "user": {"name": "kim"},
        "num_ctx": 1,
    }
    assert sent(ChatCompletionRequest, HI | extra).messages == HI["messages"]
    assert sent(ChatCompletionRequest, HI | {"user": 7, "temperature": 1}).temperature == 1.0
