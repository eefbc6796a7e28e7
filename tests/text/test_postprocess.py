"""One choice from tokens to words: whatever an engine delivers together, a client reads the same answer."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.text.logprobs import FLOOR
from nanoserve.text.policy import OutputPolicy, Thinking
from nanoserve.text.postprocess import ChoiceProcessor
from nanoserve.text.tokenizer import Tokenizer
from tests.text.answers import answer, random_sizes
from tests.text.small_tokenizer import random_cut

ADD = '<tool_call>{"name": "add", "arguments": {"x": 2, "y": 40}}</tool_call>'
THOUGHT = "<think>\nweigh both options\n</think>\n\n"
AGENT = OutputPolicy(thinking=Thinking.AUTO, parse_tools=True, logprobs=1)


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, allow_special=True)


def test_thoughts_then_a_call_in_every_grouping(tokenizer: Tokenizer, pieces: dict[bytes, int]) -> None:
    """Several tokens around </think> or <tool_call> in one delta lost the last thoughts or the first words."""
    text = THOUGHT + ADD
    rng = random.Random(0)
    for ids in [encoded(tokenizer, text), *(random_cut(pieces, text, rng) for _ in range(3))]:
        whole = answer(tokenizer, AGENT, ids)
        assert (whole.reasoning, whole.content, whole.finish_reason) == ("weigh both options", "", "tool_calls")
        assert whole.calls == [("add", '{"x": 2, "y": 40}')]
        for _ in range(60):
            assert answer(tokenizer, AGENT, ids, random_sizes(rng, len(ids))) == whole


def test_every_cut_by_max_tokens_says_length(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, THOUGHT + "Pick it. " + ADD)
    for end in range(1, len(ids) + 1):
        whole = answer(tokenizer, AGENT, ids[:end], finish=FinishReason.LENGTH)
        single = answer(tokenizer, AGENT, ids[:end], [1] * end, finish=FinishReason.LENGTH)
        assert whole == single
        assert whole.finish_reason == "length"
        assert (whole.num_tokens, len(whole.logprobs), whole.token_ids) == (end, end, ids[:end])
        if "</think>" not in tokenizer.decode(ids[:end]):
            assert whole.content == ""
        for _, arguments in whole.calls:
            json.loads(arguments)


def test_a_stop_string_ends_the_answer_and_the_count(tokenizer: Tokenizer, pieces: dict[bytes, int]) -> None:
    text = "alpha beta gamma STOP-HERE tail words follow"
    for seed in range(5):
        ids = random_cut(pieces, text, random.Random(seed))
        policy = OutputPolicy(stop=("STOP-HERE",), logprobs=0)
        single = answer(tokenizer, policy, ids, [1] * len(ids))
        assert single.content == "alpha beta gamma "
        assert (single.finish_reason, single.stop_reason) == ("stop", "STOP-HERE")
        shortest = next(n for n in range(len(ids)) if "STOP-HERE" in tokenizer.decode(ids[:n]))
        assert single.num_tokens == shortest == len(single.logprobs) == len(single.token_ids)
        assert single.stopped_by_text
        for sizes in ([2] * 30, [3] * 30, random_sizes(random.Random(seed), 60)):
            assert answer(tokenizer, policy, ids, sizes) == single
        kept = answer(tokenizer, OutputPolicy(stop=("STOP-HERE",), include_stop_str_in_output=True), ids, [2] * 9)
        assert kept.content == "alpha beta gamma STOP-HERE"


def test_after_a_stop_string_nothing_more_is_said(tokenizer: Tokenizer) -> None:
    request = GenerateRequest(request_id="r-0", prompt_token_ids=(1,), sampling=SamplingParams())
    processor = ChoiceProcessor(tokenizer, OutputPolicy(stop=("b",)), request)
    first = processor.feed(RequestOutput(request_id="r-0", new_token_ids=tuple(encoded(tokenizer, "a b c"))))
    late = processor.feed(RequestOutput(request_id="r-0", new_token_ids=(5,), finish_reason=FinishReason.ABORT))
    assert (first.content, first.finish_reason, first.stopped_by_text) == ("a ", "stop", True)
    assert (late.content, late.finish_reason, late.new_token_ids) == ("", None, ())
    assert late.num_completion_tokens == first.num_completion_tokens


def test_min_tokens_disarms_early_stop_strings(tokenizer: Tokenizer) -> None:
    unit = encoded(tokenizer, " one two three")
    ids = unit * 6
    policy = OutputPolicy(stop=(" two",))
    late = answer(tokenizer, policy, ids, [1] * len(ids), min_tokens=len(unit) + 1)
    assert late.content == " one two three one"
    assert late.num_tokens >= len(unit) + 1
    assert answer(tokenizer, policy, ids, [1] * len(ids)).content == " one"
    assert answer(tokenizer, policy, ids, [4] * 9, min_tokens=len(unit) + 1) == late


def test_a_stop_token_counts_and_is_not_shown(tokenizer: Tokenizer) -> None:
    eos = tokenizer.id_of("<|im_end|>")
    assert eos is not None
    ids = [*encoded(tokenizer, "hello"), eos]
    policy = OutputPolicy(logprobs=0)
    ended = answer(tokenizer, policy, ids, stop_token_id=eos)
    assert (ended.content, ended.num_tokens, ended.stop_reason) == ("hello", len(ids), None)
    assert (ended.logprobs[-1].token, ended.logprobs[-1].bytes) == ("<|im_end|>", b"")
    word = encoded(tokenizer, " world")
    own = OutputPolicy(stop_token_ids=(word[-1],))
    assert answer(tokenizer, own, [*ids[:-1], *word], stop_token_id=word[-1]).stop_reason == word[-1]
    assert " world" not in answer(tokenizer, own, [*ids[:-1], *word], stop_token_id=word[-1]).content
    shown = OutputPolicy(stop_token_ids=(word[-1],), include_stop_str_in_output=True)
    assert answer(tokenizer, shown, [*ids[:-1], *word], stop_token_id=word[-1]).content == "hello world"


def test_a_stop_token_of_the_requests_own_is_hidden_from_logprobs_too(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, "hello x")
    policy = OutputPolicy(stop_token_ids=(ids[-1],), logprobs=0)
    ended = answer(tokenizer, policy, ids, [1] * len(ids), stop_token_id=ids[-1])
    assert ended.content == tokenizer.decode(ids[:-1])
    assert b"".join(entry.bytes for entry in ended.logprobs) == ended.content.encode()
    assert len(ended.logprobs) == len(ids)


def test_what_a_stop_string_held_back_is_shown_in_the_end(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, "tail STOP-HER")
    ended = answer(tokenizer, OutputPolicy(stop=("STOP-HERE",)), ids, [1] * len(ids), finish=FinishReason.LENGTH)
    assert (ended.content, ended.finish_reason) == ("tail STOP-HER", "length")


def test_with_thinking_off_everything_is_content(tokenizer: Tokenizer) -> None:
    off = answer(tokenizer, OutputPolicy(), encoded(tokenizer, THOUGHT + ADD))
    assert (off.content, off.reasoning, off.calls, off.finish_reason) == (THOUGHT + ADD, "", [], "stop")


def test_errors_and_aborts_are_passed_on(tokenizer: Tokenizer) -> None:
    request = GenerateRequest(request_id="r-0", prompt_token_ids=(1,), sampling=SamplingParams())
    processor = ChoiceProcessor(tokenizer, OutputPolicy(), request)
    fault = ("server_error", "lost")
    delta = processor.feed(RequestOutput(request_id="r-0", finish_reason=FinishReason.ERROR, error=fault))
    assert (delta.finish_reason, delta.error) == ("error", fault)


POLICIES = [
    OutputPolicy(logprobs=1),
    OutputPolicy(stop=("ab", "\ufffd!"), logprobs=0),
    OutputPolicy(thinking=Thinking.OPEN, skip_special_tokens=False),
    OutputPolicy(thinking=Thinking.AUTO, parse_tools=True, stop=("}}",), logprobs=2),
]


@given(
    policy=st.sampled_from(POLICIES),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    words=st.lists(
        st.one_of(st.integers(0, 440), st.sampled_from(["<think>", "</think>", ADD, "ab", " ", "🧵"])),
        min_size=1,
        max_size=20,
    ),
    sizes=st.lists(st.integers(1, 5)),
    min_tokens=st.integers(0, 5),
)
@settings(max_examples=300, deadline=None)
def test_no_grouping_changes_an_answer(
    tokenizer: Tokenizer,
    policy: OutputPolicy,
    finish: FinishReason,
    words: list[int | str],
    sizes: list[int],
    min_tokens: int,
) -> None:
    ids = [i for word in words for i in ([word] if isinstance(word, int) else encoded(tokenizer, word))]
    whole = answer(tokenizer, policy, ids, finish=finish, min_tokens=min_tokens)
    assert answer(tokenizer, policy, ids, sizes, finish=finish, min_tokens=min_tokens) == whole
    assert answer(tokenizer, policy, ids, [1] * len(ids), finish=finish, min_tokens=min_tokens) == whole


@given(
    ids=st.lists(st.integers(0, 440), min_size=1, max_size=30), sizes=st.lists(st.integers(1, 5)), skip=st.booleans()
)
@settings(deadline=None)
def test_logprob_bytes_join_to_the_text(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    """Random ids: split and broken characters, special tokens, padding rows."""
    plain = answer(
        tokenizer, OutputPolicy(logprobs=1, skip_special_tokens=skip), ids, sizes, finish=FinishReason.LENGTH
    )
    assert plain.content == tokenizer.decode(ids, skip_special_tokens=skip)
    assert b"".join(entry.bytes for entry in plain.logprobs) == plain.content.encode()
    assert [entry.token_id for entry in plain.logprobs] == ids
    for entry, end in zip(plain.logprobs, range(len(ids)), strict=True):
        before = b"".join(other.bytes for other in plain.logprobs[:end])
        assert entry.text_offset == len(before.decode("utf-8", "replace"))


def test_logprob_entries(tokenizer: Tokenizer) -> None:
    ids = encoded(tokenizer, "hello")
    request = GenerateRequest(request_id="r-0", prompt_token_ids=(1,), sampling=SamplingParams())
    processor = ChoiceProcessor(tokenizer, OutputPolicy(logprobs=1), request)
    entries = (TokenLogprobs(ids[0], float("-inf"), 9, ((3, -0.1), (4, -9.0))),)
    delta = processor.feed(RequestOutput(request_id="r-0", new_token_ids=(ids[0],), logprobs=entries))
    (entry,) = delta.logprobs
    assert entry.logprob == FLOOR
    assert [(top.token_id, top.logprob) for top in entry.top] == [(3, -0.1), (ids[0], FLOOR)]


def echoed(tokenizer: Tokenizer, prompt: list[int], cut: int) -> tuple[str, list[tuple[str, float | None, int]]]:
    """Text and (token, logprob, offset) of an echoed prompt and one word, the prompt's entries in two pieces."""
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    policy = OutputPolicy(echo=True, logprobs=1, prompt_text=text)
    request = GenerateRequest(request_id="r-0", prompt_token_ids=tuple(prompt), sampling=SamplingParams())
    processor = ChoiceProcessor(tokenizer, policy, request)
    entries = tuple(TokenLogprobs(token_id, -float(token_id), 1, ()) for token_id in prompt[1:])
    last = encoded(tokenizer, "x")[0]
    outputs = [
        RequestOutput(request_id="r-0", prompt_logprobs=entries[:cut]),
        RequestOutput(
            request_id="r-0",
            prompt_logprobs=entries[cut:],
            new_token_ids=(last,),
            logprobs=(TokenLogprobs(last, -1.0, 1, ()),),
            finish_reason=FinishReason.LENGTH,
        ),
    ]
    deltas = [processor.feed(output) for output in outputs]
    joined = [(entry.token, entry.logprob, entry.text_offset) for delta in deltas for entry in delta.logprobs]
    return "".join(delta.content for delta in deltas), joined


def test_echo_puts_the_prompt_and_its_entries_first(tokenizer: Tokenizer) -> None:
    """Shifted or joined entries score every multiple-choice benchmark at chance, without an error."""
    prompt = encoded(tokenizer, "say it <|im_end|> 🧵")
    text, entries = echoed(tokenizer, prompt, 2)
    assert text == "say it <|im_end|> 🧵x"
    assert [logprob for _, logprob, _ in entries] == [None, *(-float(token_id) for token_id in prompt[1:]), -1.0]
    assert all(text[offset : offset + len(token)] == token for token, _, offset in entries if "\ufffd" not in token)
    assert all(echoed(tokenizer, prompt, cut) == (text, entries) for cut in range(len(prompt)))


def test_prompt_entries_that_come_again_are_not_written_twice(tokenizer: Tokenizer) -> None:
    policy = OutputPolicy(echo=True, logprobs=0, prompt_text="say it")
    prompt = encoded(tokenizer, "say it")
    request = GenerateRequest(request_id="r-0", prompt_token_ids=tuple(prompt), sampling=SamplingParams())
    processor = ChoiceProcessor(tokenizer, policy, request)
    output = RequestOutput(request_id="r-0", prompt_logprobs=tuple(TokenLogprobs(i, -1.0, 1) for i in prompt[1:]))
    assert [len(processor.feed(output).logprobs) for _ in range(3)] == [len(prompt), 0, 0]


def test_one_prompt_token_has_one_entry(tokenizer: Tokenizer) -> None:
    text, entries = echoed(tokenizer, encoded(tokenizer, "a"), 0)
    assert (text, [logprob for _, logprob, _ in entries]) == ("ax", [None, -1.0])


@pytest.mark.parametrize("policy", [OutputPolicy(), OutputPolicy(thinking=Thinking.AUTO, parse_tools=True)])
def test_an_answer_without_tokens(tokenizer: Tokenizer, policy: OutputPolicy) -> None:
    empty = answer(tokenizer, policy, [], finish=FinishReason.LENGTH)
    assert (empty.content, empty.num_tokens, empty.finish_reason) == ("", 0, "length")
