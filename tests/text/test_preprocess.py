"""What a body asks for reaches the engine; what can never work is refused at the door, by name."""

import json
from typing import Any

import pytest

from nanoserve.core.errors import InvalidRequestError
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.policy import Thinking
from nanoserve.text.preprocess import ModelLimits, PreparedRequest, Preprocessor
from nanoserve.text.prompts import MAX_PROMPTS
from nanoserve.text.tokenizer import Tokenizer

HI = {"model": "m", "messages": [{"role": "user", "content": "say it"}]}
PING = {
    "type": "function",
    "function": {"name": "ping", "description": "", "strict": False, "parameters": {"type": "object"}},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "Out", "strict": True, "schema": {"type": "object"}}}


def chat(preprocessor: Preprocessor, **fields: Any) -> PreparedRequest:
    return preprocessor.chat(ChatCompletionRequest.model_validate(HI | fields), "r")


def completions(preprocessor: Preprocessor, prompt: Any = "x", **fields: Any) -> list[PreparedRequest]:
    return preprocessor.completion(CompletionRequest.model_validate({"prompt": prompt} | fields), "r")


def only(prepared: PreparedRequest) -> GenerateRequest:
    (request,) = prepared.choices
    return request


def refused(preprocessor: Preprocessor, prompt: Any = None, **fields: Any) -> InvalidRequestError:
    send = (
        (lambda: chat(preprocessor, **fields))
        if prompt is None
        else (lambda: completions(preprocessor, prompt, **fields))
    )
    with pytest.raises(InvalidRequestError) as caught:
        send()
    assert len(caught.value.message) < 600
    return caught.value


CLIENT_BODIES: list[dict[str, Any]] = [
    {
        "messages": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 16, "stream": True, "stream_options": {"include_usage": True}, "store": False,
        "parallel_tool_calls": True, "metadata": {"job": "t1"}, "service_tier": "auto", "reasoning_effort": "low",
        "verbosity": "low", "prompt_cache_key": "k", "safety_identifier": "u1", "response_format": SCHEMA,
    },
    {"temperature": 0.1, "max_tokens": None, "stream": False, "tools": [PING], "tool_choice": "auto"},
    {
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stop": None,
        "temperature": 0.8, "top_k": 40, "min_p": 0.0, "repeat_penalty": 1.1, "num_ctx": 4096, "ignore_eos": True,
        "user": {"name": "kim", "id": "u1"},
    },
    {
        "temperature": 0.0, "max_tokens": 16, "top_p": 1, "user": "end-user", "extra_body": {}, "tools": None,
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "tool_choice": "auto", "stop": ["\n\n", "Q:", None],
    },
    {
        "logit_bias": {}, "seed": None, "stop": None, "n": 1, "top_logprobs": None, "logprobs": False,
        "modalities": ["text"],
        "frequency_penalty": 0, "presence_penalty": 0, "response_format": {"type": "text"}, "top_k": 20, "min_p": 0,
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False, "unknown": 1},
        "skip_special_tokens": True,
    },
    {"tools": [], "tool_choice": "none"},
    {"tool_choice": "none"},
    {"stop": []},
    {"seed": -1},
    {"seed": 9223372036854775807},
]  # fmt: skip


@pytest.mark.parametrize("fields", CLIENT_BODIES)
def test_bodies_of_real_clients_are_accepted(preprocessor: Preprocessor, fields: dict[str, Any]) -> None:
    assert only(chat(preprocessor, **fields)).prompt_token_ids


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("stop", {"stop": ""}), ("stop", {"stop": ["ok", ""]}), ("stop", {"stop": [1, 2]}),
        ("stop", {"stop": ["\ud83d"]}),
        ("temperature", {"temperature": -0.1}), ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": float("inf")}), ("top_p", {"top_p": 0}), ("top_p", {"top_p": 1.01}),
        ("top_p", {"top_p": float("nan")}), ("min_p", {"min_p": float("nan")}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("repetition_penalty", {"repetition_penalty": float("nan")}),
        ("logit_bias", {"logit_bias": {"1": float("nan")}}),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 3}), ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -3}), ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("n", {"n": 0}), ("seed", {"seed": 2**64}), ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 9999}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": -1}),
        ("logit_bias", {"logit_bias": {"AI": -100}}), ("logit_bias", {"logit_bias": {"-1": 1}}),
        ("logit_bias", {"logit_bias": {"42": 250}}), ("logit_bias", {"logit_bias": {"9" * 30: 1}}),
        ("stop_token_ids", {"stop_token_ids": [10**6]}), ("stop_token_ids", {"stop_token_ids": [True]}),
        ("stream_options", {"stream_options": {"include_usage": True}}), ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": "bad \ud83d end"}]}),
        ("modalities", {"modalities": ["audio"]}),
        ("tool_choice", {"tools": [], "tool_choice": "required", "stream": True}),
        ("tool_choice", {"tools": [PING], "tool_choice": {"type": "function", "function": {"name": "nope"}}}),
        ("tool_choice", {"tools": [PING], "tool_choice": "any"}), ("tool_choice", {"tools": [PING], "tool_choice": {}}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "bad name!", "parameters": "x"}}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}),
        ("tools", {"tools": [{"type": "retrieval"}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": ""}}]}),
        ("response_format", {"response_format": {"type": "xml"}}), ("response_format", {"response_format": {}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": SCHEMA | {"json_schema": {"schema": {"type": "objekt"}}}}),
        ("structured_outputs", {"structured_outputs": {"json": {}, "regex": "a"}}),
        ("structured_outputs", {"structured_outputs": {"choice": [1]}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("guided_regex", {"guided_regex": "(?P<x>"}),
        ("structured_outputs", {"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}),
        ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "x"}}),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_work_is_refused_by_name(
    preprocessor: Preprocessor, param: str, fields: dict[str, Any]
) -> None:
    assert refused(preprocessor, **fields).param == param


@pytest.mark.parametrize(
    ("param", "prompt", "fields"),
    [
        ("prompt", "", {}), ("prompt", [], {}), ("prompt", [""], {}), ("prompt", [[]], {}), ("prompt", ["a", ""], {}),
        ("prompt", [9, -5], {}), ("prompt", [1.5], {}), ("prompt", [True], {}), ("prompt", [5279552648203111001], {}),
        ("prompt", [None], {}), ("prompt", [[1, "x"]], {}), ("prompt", ["a", 1], {}), ("prompt", "bad \udc00", {}),
        ("prompt", [[1]] * (MAX_PROMPTS + 1), {}), ("max_tokens", "x", {"max_tokens": 0}),
        ("logprobs", "x", {"logprobs": 21}),
        ("suffix", "x", {"suffix": "y"}), ("best_of", "x", {"best_of": 3}), ("best_of", "x", {"best_of": 2, "n": 3}),
        ("prompt_logprobs", "x", {"prompt_logprobs": -1}),
    ],
)  # fmt: skip
def test_a_completion_that_cannot_work_is_refused_by_name(
    preprocessor: Preprocessor, param: str, prompt: Any, fields: dict[str, Any]
) -> None:
    assert refused(preprocessor, prompt, **fields).param == param


def test_ids_are_checked_against_the_embedding_rows(preprocessor: Preprocessor, limits: ModelLimits) -> None:
    last = limits.vocab_size - 1
    (prepared,) = completions(preprocessor, [1, last], logit_bias={str(last): 100})
    assert only(prepared).prompt_token_ids == (1, last)
    assert only(prepared).sampling.logit_bias == {last: 100}
    assert refused(preprocessor, [1, last + 1]).param == "prompt"
    assert refused(preprocessor, logit_bias={str(last + 1): 5}).param == "logit_bias"


def small(tokenizer: Tokenizer, **fields: Any) -> Preprocessor:
    limits = {"max_model_len": 64, "vocab_size": 440, "max_kv_tokens": 1000} | fields
    return Preprocessor(tokenizer, ModelLimits(**limits), GenerationDefaults())


def test_prompts_times_choices_are_bounded_before_any_is_made(tokenizer: Tokenizer) -> None:
    preprocessor = small(tokenizer)
    assert len(completions(preprocessor, ["a"] * 16, n=128)) == 16
    assert refused(preprocessor, ["a"] * 17, n=128).param == "n"


def test_prompts_at_the_limit(tokenizer: Tokenizer) -> None:
    preprocessor = small(tokenizer)
    for ids, max_tokens in (([1] * 64, 4), ([1] * 65, 1), ([1] * 65, 0)):
        error = refused(preprocessor, ids, max_tokens=max_tokens, echo=True)
        assert error.code == "context_length_exceeded"
        assert str(len(ids)) in error.message
        assert "64" in error.message
    (fits,) = completions(preprocessor, [1] * 63, max_tokens=4)
    assert only(fits).sampling.max_tokens == 1
    (scored,) = completions(preprocessor, [1] * 64, max_tokens=0, echo=True)
    assert only(scored).sampling.max_tokens == 0


def test_a_huge_prompt_is_refused_before_it_is_tokenized(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    preprocessor = small(tokenizer)
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    for error in (
        refused(preprocessor, "word " * 40_000),
        refused(preprocessor, messages=[{"role": "user", "content": "word " * 40_000}]),
    ):
        assert error.code == "context_length_exceeded"
        assert "64" in error.message


def test_a_pool_smaller_than_the_context_bounds_too(tokenizer: Tokenizer) -> None:
    preprocessor = small(tokenizer, max_kv_tokens=32)
    (fits,) = completions(preprocessor, [1] * 30, max_tokens=10)
    assert only(fits).sampling.max_tokens == 2
    assert "32" in refused(preprocessor, [1] * 33).message


def test_max_tokens(preprocessor: Preprocessor, limits: ModelLimits) -> None:
    def resolved(**fields: Any) -> int | None:
        return only(chat(preprocessor, **fields)).sampling.max_tokens

    room = limits.max_model_len - len(chat(preprocessor).prompt_token_ids)
    assert resolved() == resolved(max_tokens=None) == resolved(max_tokens=1_000_000) == room
    assert resolved(max_tokens=3, max_completion_tokens=5) == 5
    assert resolved(max_tokens=3) == 3
    assert only(completions(preprocessor)[0]).sampling.max_tokens == 16


def test_the_models_defaults_fill_in_and_the_request_wins(tokenizer: Tokenizer, limits: ModelLimits) -> None:
    defaults = GenerationDefaults(sampling={"temperature": 0.6, "top_k": 20}, max_new_tokens=7, eos_token_ids=(5, 3))
    preprocessor = Preprocessor(tokenizer, limits, defaults)
    sampling = only(chat(preprocessor)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.6, 20, 1.0, 7)
    sampling = only(chat(preprocessor, temperature=1, top_k=-1, max_tokens=9)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (1.0, 0, 9)
    assert only(completions(preprocessor)[0]).sampling.max_tokens == 16


def test_stop_ids_are_the_models_and_the_requests(preprocessor: Preprocessor, tokenizer: Tokenizer) -> None:
    end, pad = tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")
    prepared = chat(preprocessor, stop_token_ids=[7, end])
    assert only(prepared).sampling.stop_token_ids == (end, pad, 7)
    assert prepared.policy.stop_token_ids == (7, end)
    assert only(chat(preprocessor, stop_token_ids=[7], ignore_eos=True)).sampling.stop_token_ids == (7,)
    assert chat(preprocessor, stop=["a", None, "b"]).policy.stop == ("a", "b")
    assert only(chat(preprocessor, stop="a")).sampling.stop == ()


def test_seeds(preprocessor: Preprocessor) -> None:
    def seeds(**fields: Any) -> list[int | None]:
        return [choice.sampling.seed for choice in chat(preprocessor, **fields).choices]

    assert seeds(seed=11, n=4) == seeds(seed=11, n=4)
    assert len(set(seeds(seed=11, n=4))) == 4
    assert seeds(seed=11, n=4)[0] == seeds(seed=11)[0] == chat(preprocessor, seed=11).seed == 11
    assert seeds(n=3) != seeds(n=3)
    drawn = seeds(n=4)
    assert len({*drawn, *seeds(n=4)}) == 8
    assert None not in drawn
    assert seeds(seed=-1) == [2**64 - 1]


def test_a_seeded_door_draws_the_same_seeds_again(tokenizer: Tokenizer, limits: ModelLimits) -> None:
    def drawn(seed: int) -> list[int]:
        door = Preprocessor(tokenizer, limits, GenerationDefaults(eos_token_ids=()), seed=seed)
        return [chat(door).seed for _ in range(3)]

    assert drawn(5) == drawn(5)
    assert len({*drawn(5), *drawn(6)}) == 6


def test_choices_have_ids_in_the_order_of_their_index(preprocessor: Preprocessor) -> None:
    prepared = completions(preprocessor, [[1], [2, 3]], n=2, best_of=2)
    assert [[choice.request_id for choice in item.choices] for item in prepared] == [["r-0", "r-1"], ["r-2", "r-3"]]
    assert [item.prompt_token_ids for item in prepared] == [(1,), (2, 3)]
    assert all(choice.sampling.n == 1 for item in prepared for choice in item.choices)


def test_a_text_prompt_may_hold_special_tokens_and_a_chat_may_not(
    preprocessor: Preprocessor, tokenizer: Tokenizer
) -> None:
    end = tokenizer.id_of("<|im_end|>")
    assert end in completions(preprocessor, "a<|im_end|>")[0].prompt_token_ids
    plain = chat(preprocessor, messages=[{"role": "user", "content": "a"}]).prompt_token_ids
    typed = chat(preprocessor, messages=[{"role": "user", "content": "a<|im_end|>"}]).prompt_token_ids
    assert typed.count(end or 0) == plain.count(end or 0)


def test_logprobs(preprocessor: Preprocessor) -> None:
    for fields, asked in (
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
        ({"logprobs": False}, None),
    ):
        prepared = chat(preprocessor, **fields)
        assert only(prepared).sampling.logprobs == prepared.policy.logprobs == asked
    (echo,) = completions(preprocessor, "hello", echo=True, logprobs=2)
    assert (only(echo).sampling.prompt_logprobs, echo.policy.prompt_text, echo.policy.echo) == (2, "hello", True)
    assert echo.policy.prompt_logprobs is None
    (ids,) = completions(preprocessor, list(echo.prompt_token_ids), echo=True)
    assert (ids.policy.prompt_text, only(ids).sampling.prompt_logprobs) == ("hello", None)
    (scored,) = completions(preprocessor, "hello", prompt_logprobs=3, max_tokens=0)
    assert (only(scored).sampling.prompt_logprobs, scored.policy.prompt_logprobs, scored.policy.echo) == (3, 3, False)


def test_thinking(preprocessor: Preprocessor, tokenizer: Tokenizer, limits: ModelLimits) -> None:
    def thinking(**fields: Any) -> Thinking:
        return chat(preprocessor, **fields).policy.thinking

    assert thinking() is Thinking.AUTO
    for fields in (
        {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}, {"separate_reasoning": False},
        {"reasoning_effort": "none"},
    ):  # fmt: skip
        assert thinking(**fields) is Thinking.OFF
    assert thinking(enable_thinking=False, chat_template_kwargs={"enable_thinking": True}) is Thinking.AUTO
    off = Preprocessor(tokenizer, limits, GenerationDefaults(), reasoning=False)
    assert chat(off).policy.thinking is Thinking.OFF
    extra = len(chat(preprocessor, enable_thinking=False).prompt_token_ids) - len(chat(preprocessor).prompt_token_ids)
    assert extra == len(tokenizer.encode("<think>\n\n</think>\n\n", allow_special=True))


def test_tools(preprocessor: Preprocessor) -> None:
    plain = chat(preprocessor)
    offered = chat(preprocessor, tools=[PING])
    assert offered.policy.parse_tools
    assert offered.prompt_text is not None
    assert json.dumps(PING) in offered.prompt_text
    for fields in ({"tools": [PING], "tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        silent = chat(preprocessor, **fields)
        assert (silent.policy.parse_tools, silent.prompt_token_ids) == (False, plain.prompt_token_ids)
    assert not chat(preprocessor, tools=[PING], parallel_tool_calls=False).policy.parallel_tool_calls
    named = {"type": "function", "function": {"name": "ping"}}
    assert only(offered).grammar is None
    for choice in ("required", named):
        assert only(chat(preprocessor, tools=[PING], tool_choice=choice)).grammar is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}}, {"response_format": SCHEMA},
        {"structured_outputs": {"regex": "[ab]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}}, {"structured_outputs": {"grammar": 'start: "a"'}},
        {"structured_outputs": {"json": {"type": "object"}}}, {"guided_choice": ["a"]},
        {"guided_json": '{"type": "object"}'},
    ],
)  # fmt: skip
def test_forms_become_grammars(preprocessor: Preprocessor, fields: dict[str, Any]) -> None:
    plain = only(chat(preprocessor, enable_thinking=False, **fields)).grammar
    assert plain is not None
    assert "think" not in plain.text
    thinking = only(chat(preprocessor, **fields)).grammar
    assert thinking is not None
    assert "<think>" in thinking.text
    assert only(completions(preprocessor, **fields)[0]).grammar == plain


def test_tokenize_and_detokenize(preprocessor: Preprocessor, tokenizer: Tokenizer, limits: ModelLimits) -> None:
    ids = preprocessor.tokenize(TokenizeRequest.model_validate({"prompt": "a<|im_end|>"}))
    assert ids[-1] == tokenizer.id_of("<|im_end|>")
    assert preprocessor.detokenize(DetokenizeRequest.model_validate({"tokens": list(ids)})) == "a<|im_end|>"
    hidden = {"tokens": [*ids, limits.vocab_size - 1], "skip_special_tokens": True}
    assert preprocessor.detokenize(DetokenizeRequest.model_validate(hidden)) == "a"
    assert (
        preprocessor.tokenize(TokenizeRequest.model_validate({"messages": HI["messages"]}))
        == chat(preprocessor).prompt_token_ids
    )
    for body in ({}, {"prompt": "a", "messages": HI["messages"]}, {"prompt": "\ud83d"}):
        with pytest.raises(InvalidRequestError):
            preprocessor.tokenize(TokenizeRequest.model_validate(body))
    for tokens in ([limits.vocab_size], [-1], [True], ["x"], [2**70]):
        with pytest.raises(InvalidRequestError):
            preprocessor.detokenize(DetokenizeRequest.model_validate({"tokens": tokens}))


def test_offline_callers_meet_the_same_limits(preprocessor: Preprocessor) -> None:
    params = SamplingParams(max_tokens=3, stop="x")
    assert preprocessor.prompt("hi", params, "r").policy.stop == ("x",)
    hi = [{"role": "user", "content": "hi"}]
    assert preprocessor.conversation(hi, params, "r").prompt_text is not None
    for prompt in ("", [], "bad \ud83d", [10**6]):
        with pytest.raises(InvalidRequestError):
            preprocessor.prompt(prompt, params, "r")
    for messages in ([], [{"role": "user", "content": "bad \ud83d"}], [{"role": "wizard", "content": "hi"}]):
        with pytest.raises(InvalidRequestError):
            preprocessor.conversation(messages, params, "r")


def test_around_a_tokenized_text_nothing_is_put_unless_wanted(
    preprocessor: Preprocessor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def encode(_: str, *, allow_special: bool, add_special_tokens: bool) -> list[int]:
        asked.append(allow_special and add_special_tokens)
        return [1]

    monkeypatch.setattr(tokenizer, "encode", encode)
    for field in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        preprocessor.tokenize(TokenizeRequest.model_validate({"prompt": "a"} | field))
    assert asked == [True, True, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "x" * 1025),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [1] * 1025),
        ("messages", [{"role": "user", "content": ""}] * 5000),
        ("messages", [{"role": "user", "content": "x" * 500_000}]),
        ("logit_bias", {str(number): 1 for number in range(4097)}),
    ],
)
def test_nothing_is_without_end(preprocessor: Preprocessor, field: str, value: object) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], field: value}
    with pytest.raises(InvalidRequestError) as caught:
        preprocessor.chat(ChatCompletionRequest.model_validate(body), "r")
    assert caught.value.param == field
    assert len(caught.value.message) < 300
