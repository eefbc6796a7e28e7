"""Masks allow exactly what the grammar allows, whenever it begins and however often it is rebuilt."""

import json
import random
import threading
import weakref
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanoserve.core.plan import AdmittedState, SampledTokens, ScheduledRequest
from nanoserve.core.request import Grammar
from nanoserve.core.sampling import SamplingParams, StructuredOutputs
from nanoserve.model.grammar import GrammarMatcher, GrammarTable, GrammarTokenizer
from nanoserve.text.grammar import grammar_text, tool_call_grammar

EOS, VOCAB = 256, 300


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarTokenizer:
    """One token a byte, an end token, and padding rows up to 300."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={char: byte_of[char] for char in alphabet}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    folder: Path = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    return GrammarTokenizer(folder, VOCAB)


def allowed(matcher: GrammarMatcher) -> list[int]:
    row = torch.zeros((VOCAB + 31) // 32, dtype=torch.int32)
    assert matcher.fill(row)
    return bits(row)


def bits(row: torch.Tensor) -> list[int]:
    return [t for t in range(VOCAB) if int(row[t // 32]) >> (t % 32) & 1]


def random_text(vocabulary: GrammarTokenizer, grammar: Grammar, seed: int, limit: int = 300) -> tuple[str, bool]:
    """Choose freely among the allowed tokens; also (text, whether the grammar ended)."""
    rng, ids = random.Random(seed), list[int]()
    matcher = vocabulary.matcher(grammar, [])
    while len(ids) < limit:
        choices = allowed(matcher)
        assert choices, "a grammar must never leave nothing to choose"
        token = EOS if EOS in choices and rng.random() < 0.5 else rng.choice(choices)
        if token == EOS:
            return bytes(ids).decode(), True
        ids.append(token)
        if len(ids) % 7 == 0:
            matcher = vocabulary.matcher(grammar, ids)  # as after a preemption
        else:
            matcher.accept([token])
    return bytes(ids).decode(errors="ignore"), False


@pytest.mark.parametrize("seed", range(20))
def test_free_choice_within_a_schema_gives_a_valid_document(vocabulary: GrammarTokenizer, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 12}, "s": {"enum": ["a", "日本", 'q"']}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    text, ended = random_text(
        vocabulary, Grammar(grammar_text(StructuredOutputs(json=json.dumps(schema))), (EOS,)), seed
    )
    if ended:
        value = json.loads(text)
        assert set(value) == {"n", "s"}
        assert 1 <= value["n"] <= 12
        assert value["s"] in schema["properties"]["s"]["enum"]  # type: ignore[index]


def test_most_free_choices_end(vocabulary: GrammarTokenizer) -> None:
    grammar = Grammar(grammar_text(StructuredOutputs(choice=("yes", "no", "maybe"))), (EOS,))
    texts = {random_text(vocabulary, grammar, seed) for seed in range(40)}
    assert texts == {("yes", True), ("no", True), ("maybe", True)}


def test_a_tool_call_is_forced(vocabulary: GrammarTokenizer) -> None:
    parameters = {"properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
    tools: list[dict[str, object]] = [{"name": "ping"}, {"name": "add", "parameters": parameters}]
    names = set()
    for seed in range(20):
        text, ended = random_text(vocabulary, Grammar(tool_call_grammar(tools), (EOS,)), seed)
        if ended:
            call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            names.add(call["name"])
    assert names == {"ping", "add"}


def test_samples_after_drafts_are_masked_as_if_the_drafts_were_accepted(vocabulary: GrammarTokenizer) -> None:
    table = GrammarTable(vocabulary)
    grammar = Grammar(grammar_text(StructuredOutputs(regex="abcd")), (EOS,))
    state = AdmittedState(token_ids=(1, 2, ord("a")), num_prompt_tokens=2, sampling=SamplingParams(), grammar=grammar)
    table.admit("r", state)
    free = ScheduledRequest(request_id="free", token_ids=(1,), num_computed_tokens=0, num_samples=5)
    drafted = ScheduledRequest(
        request_id="r", token_ids=(ord("a"), ord("b"), ord("x"), ord("d")), num_computed_tokens=2, num_samples=4
    )
    for _ in range(2):  # asking changes nothing
        allowed_now = table.begin([free, drafted])()
        assert allowed_now is not None
        entries, masks = allowed_now
        assert entries.tolist() == [5, 6]
        assert [bits(mask) for mask in masks] == [[ord("b")], [ord("c")]]
    table.accept({"r": SampledTokens(token_ids=tuple(b"bc"))})
    one = ScheduledRequest(request_id="r", token_ids=(ord("c"),), num_computed_tokens=5, num_samples=1)
    last = table.begin([one])()
    assert last is not None
    assert [bits(mask) for mask in last[1]] == [[ord("d")]]
    table.release("r")
    assert table.begin([one])() is None


def test_a_grammar_that_fails_ends_its_request_alone(vocabulary: GrammarTokenizer) -> None:
    table = GrammarTable(vocabulary)
    texts = {"good": grammar_text(StructuredOutputs(regex="ok")), "bad": "start: nowhere"}
    for request_id, text in texts.items():
        state = AdmittedState(
            token_ids=(1,), num_prompt_tokens=1, sampling=SamplingParams(), grammar=Grammar(text, (EOS,))
        )
        table.admit(request_id, state)
    plan = [
        ScheduledRequest(request_id=request_id, token_ids=(1,), num_computed_tokens=0, num_samples=1)
        for request_id in texts
    ]
    masked = table.begin(plan)()
    assert masked is not None
    assert masked[0].tolist() == [0]
    sampled = {request_id: SampledTokens(token_ids=(ord("o"),)) for request_id in (*texts, "free")}
    table.accept(sampled)
    assert [sampled[name].error is None for name in ("good", "bad", "free")] == [True, False, True]
    assert "nowhere" in (sampled["bad"].error or ("", ""))[1]


def test_end_ids_among_the_padding_rows_are_left_out(vocabulary: GrammarTokenizer) -> None:
    grammar = Grammar(grammar_text(StructuredOutputs(regex="ok")), (EOS, VOCAB - 1))
    matcher = vocabulary.matcher(grammar, list(b"ok"))
    assert allowed(matcher) == [EOS]


def test_a_grammar_is_compiled_once_while_it_is_held_or_recent(vocabulary: GrammarTokenizer) -> None:
    def numbered(number: int) -> Grammar:
        return Grammar(grammar_text(StructuredOutputs(choice=(f"choice {number}",))), (EOS,))

    held, recent = vocabulary.compiled(numbered(0)), vocabulary.compiled(numbered(1))
    assert vocabulary.compiled(numbered(1)) is recent
    gone = weakref.ref(recent)
    del recent
    for number in range(2, 80):
        vocabulary.compiled(numbered(number))
    assert vocabulary.compiled(numbered(0)) is held
    assert gone() is None


def test_a_checkpoint_without_a_tokenizer_file_fails_the_request_alone(tmp_path: Path) -> None:
    table = GrammarTable(GrammarTokenizer(tmp_path, VOCAB))
    grammar = Grammar(grammar_text(StructuredOutputs(regex="ok")), (EOS,))
    table.admit("r", AdmittedState(token_ids=(1,), num_prompt_tokens=1, sampling=SamplingParams(), grammar=grammar))
    one = ScheduledRequest(request_id="r", token_ids=(1,), num_computed_tokens=0, num_samples=1)
    assert table.begin([one])() is None
    sampled = {"r": SampledTokens(token_ids=(5,))}
    table.accept(sampled)
    assert "tokenizer.json" in (sampled["r"].error or ("", ""))[1]


def test_what_the_door_lets_through_the_engine_compiles(vocabulary: GrammarTokenizer) -> None:
    """The deepest chain of references that passes the check, on whatever stack the caller has."""
    steps: dict[str, object] = {str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(500)}
    text = grammar_text(StructuredOutputs(json=json.dumps({"$ref": "#/$defs/0", "$defs": steps | {"500": {}}})))
    small = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=vocabulary.compiled, args=[Grammar(text, (EOS,))])
        thread.start()
    finally:
        threading.stack_size(small)
    thread.join()
    assert vocabulary.matcher(Grammar(text, (EOS,))).error is None
