"""Whatever a client sends, it gets a valid model or one sentence with the field to blame."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.core.errors import InvalidRequestError
from nanoserve.protocol.body import MAX_DEPTH, parse_body
from nanoserve.protocol.openai import ChatCompletionRequest, CompletionRequest

CHAT = '{"model": "m", "messages": [{"role": "user", "content": "x"}], %s}'


def refused(raw: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(raw, ChatCompletionRequest)
    return caught.value


def test_a_good_body_is_read_and_unknown_fields_are_ignored() -> None:
    body = parse_body((CHAT % '"temperature": 1, "some_future_field": {"x": 1}').encode(), ChatCompletionRequest)
    assert body.model == "m"
    assert body.temperature == 1.0


def test_the_last_of_two_equal_keys_counts() -> None:
    assert parse_body((CHAT % '"seed": 1, "seed": 2').encode(), ChatCompletionRequest).seed == 2


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"model": "m"} trailing', "not valid JSON"),
        (b'{"model": "\xff"}', "not valid UTF-8 at byte 11"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes, words: str) -> None:
    assert words in refused(raw).message


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty"])
def test_a_number_that_is_not_finite_names_its_field(field: str, literal: str) -> None:
    error = refused((CHAT % f'"{field}": {literal}').encode())
    assert error.param == field
    assert "not a finite number" in error.message


def test_nan_deep_in_a_field_names_the_top_level_field() -> None:
    assert refused((CHAT % '"logit_bias": {"5": NaN}').encode()).param == "logit_bias"


def test_a_lone_surrogate_names_its_field_and_a_pair_is_text() -> None:
    error = refused(rb'{"model": "m", "messages": [{"role": "user", "content": "bad \ud83d end"}]}')
    assert error.param == "messages"
    assert "lone surrogate" in error.message
    body = parse_body(rb'{"model": "m", "prompt": "good \ud83e\uddf5"}', CompletionRequest)
    assert body.prompt == "good \U0001f9f5"


def test_depth_is_bounded_before_anything_recurses() -> None:
    def nested(depth: int) -> bytes:
        return (CHAT % ('"metadata": ' + '{"a":' * depth + "1" + "}" * depth)).encode()

    assert parse_body(nested(MAX_DEPTH - 1), ChatCompletionRequest).model == "m"
    assert "nested too deeply" in refused(nested(MAX_DEPTH)).message


def test_brackets_in_strings_are_no_depth() -> None:
    text = json.dumps("[{" * 500 + '\\"' + "]" * 7)
    assert parse_body((CHAT % f'"user": {text}').encode(), ChatCompletionRequest).user.startswith("[{[{")
    wide = json.dumps([[]] * 500)
    assert len(parse_body((CHAT % f'"user": {wide}').encode(), ChatCompletionRequest).user) == 500


@pytest.mark.parametrize(
    "members, param, words",
    [
        ('"temperature": "hot"', "temperature", "Given: 'hot'"),
        ('"seed": 18446744073709551616', "seed", "integer"),
        ('"max_tokens": true', "max_tokens", "integer"),
        ('"messages": {"role": "user"}', "messages", "list"),
        ('"messages": [3]', "messages", "`messages.0`"),
        ('"stream_options": {"include_usage": 3}', "stream_options", "`stream_options.include_usage`"),
        ('"chat_template_kwargs": "no"', "chat_template_kwargs", "dictionary"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(members: str, param: str, words: str) -> None:
    error = refused((CHAT % members).encode())
    assert error.param == param
    assert words in error.message


def test_a_missing_field_is_named() -> None:
    error = refused(b'{"model": "m"}')
    assert (error.message, error.param) == ("`messages` is required.", "messages")


def test_a_message_never_repeats_a_large_value() -> None:
    assert len(refused((CHAT % f'"temperature": "{"x" * 100_000}"').encode()).message) < 300
    many = json.dumps(["x"] * 100_000)
    assert len(refused((CHAT % f'"temperature": {many}').encode()).message) < 300


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,\\u0d8-eNa1', max_size=60).map(str.encode))
def test_no_bytes_raise_anything_but_a_refusal(raw: bytes) -> None:
    try:
        parse_body(raw, CompletionRequest)
    except InvalidRequestError as error:
        assert error.message  # noqa: PT017 (both outcomes are right; only another error would be wrong)
