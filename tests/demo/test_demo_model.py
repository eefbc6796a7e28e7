"""The demo data is deterministic and split cleanly; the committed checkpoint is small, whole and answers."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, Qwen3ForCausalLM

from demo.data import BASE, FINAL, Example, Split, draw, examples, split_of
from demo.evaluate import TransformersGenerate, answer_part, is_right
from demo.tasks import RELATIONS
from demo.tokenizer import ADDED, CHAT_TEMPLATE, SPECIAL, prompt_ids, target_ids
from demo.train import micro_batches, tokenized

FOLDER = Path(__file__).parents[2] / "nanoserve" / "demo_model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def ask(tokenizer: Any) -> Any:
    """Greedy answers to one-message chats."""
    generate = TransformersGenerate(FOLDER, dtype=torch.bfloat16, sample=False)

    def answers(questions: list[str], *, thinking: bool) -> list[str | None]:
        items = [Example("chat", ({"role": "user", "content": text},), (), thinking, "", "") for text in questions]
        written = generate([prompt_ids(tokenizer, item) for item in items])
        return [answer_part(tokenizer.decode(token_ids), thinking) for token_ids in written]

    return answers


def first(seed: int, split: Split, count: int) -> list[Example]:
    return list(islice(examples(random.Random(seed), split, BASE), count))


class TestData:
    def test_the_same_seed_gives_the_same_examples(self) -> None:
        assert first(3, Split.TRAIN, 300) == first(3, Split.TRAIN, 300)
        assert first(3, Split.TRAIN, 300) != first(4, Split.TRAIN, 300)

    @pytest.mark.parametrize("split", Split)
    def test_every_maker_draws_items_of_its_split_only(self, split: Split) -> None:
        rng = random.Random(7)
        for maker in BASE.tasks | FINAL.tasks:
            for _ in range(20):
                turn = draw(rng, maker, split)
                assert turn.task == "talk" or split_of(turn.key) is split, turn

    def test_no_held_out_sum_is_trained_on(self) -> None:
        held_out = {e.answer for e in first(1, Split.HELD_OUT, 3000) if e.task == "sum"}
        trained = {e.answer for e in first(0, Split.TRAIN, 6000) if e.task == "sum"}
        assert len(held_out) > 100
        assert not held_out & trained

    def test_every_fact_is_trained_on_in_some_phrasing(self) -> None:
        for relation in RELATIONS:
            for x, _ in relation.pairs:
                splits = [split_of(f"{relation.name} {x} {template}") for template in relation.questions]
                assert splits.count(Split.TRAIN) >= 3, (relation.name, x)

    def test_arithmetic_targets_are_true(self) -> None:
        for example in first(5, Split.TRAIN, 2000):
            if example.task in ("sum", "difference", "product"):
                question, _, result = example.answer.partition(" = ")
                a, sign, b = question.split()
                assert int(result) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]

    def test_the_target_itself_is_right_and_a_changed_one_is_not(self) -> None:
        for example in first(6, Split.HELD_OUT, 500):
            assert is_right(example, example.target())
            assert not is_right(example, example.target() + "x")

    def test_micro_batches_hold_every_example_once(self, tokenizer: Any) -> None:
        items = list(islice(tokenized(tokenizer, random.Random(0), Split.TRAIN, BASE), 60))
        batches = micro_batches(items)
        assert sorted(task for batch in batches for task in batch.tasks) == sorted(item.task for item in items)
        labels = sum(len(batch.labels) for batch in batches)
        assert labels == sum(end - first for item in items for first, end in item.spans)


class TestCheckpoint:
    def test_weights_are_small_and_bf16(self) -> None:
        path = FOLDER / "model.safetensors"
        assert path.stat().st_size <= 12_000_000
        with safe_open(path, "pt") as weights:
            assert {str(weights.get_slice(name).get_dtype()) for name in weights.keys()} == {"BF16"}  # noqa: SIM118

    def test_loads_without_missing_or_unknown_weights(self) -> None:
        _, info = Qwen3ForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
        assert [info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set(), set(), set()]

    def test_tokens_have_qwens_names_and_flags(self, tokenizer: Any) -> None:
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        assert added == dict.fromkeys(SPECIAL, True) | dict.fromkeys(ADDED, False)
        assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
        shown = tokenizer.decode(tokenizer.encode("<think>\n</think><|im_end|>"), skip_special_tokens=True)
        assert shown == "<think>\n</think>"

    def test_tokenizer_round_trips_any_text(self, tokenizer: Any) -> None:
        text = 'Straße 12345 "naïve" 🧵\t{"a": [1, 2]}\r\n'
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_the_template_is_qwens(self, tokenizer: Any) -> None:
        assert tokenizer.chat_template == CHAT_TEMPLATE.read_text(encoding="utf-8")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], add_generation_prompt=True, enable_thinking=False, tokenize=False
        )
        assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

    def test_targets_continue_the_prompt_as_the_template_renders_them(self, tokenizer: Any) -> None:
        example = next(e for e in examples(random.Random(0), Split.TRAIN, BASE) if e.task == "tool call" and e.thinking)
        ids = prompt_ids(tokenizer, example) + target_ids(tokenizer, example)
        whole = tokenizer.apply_chat_template(
            [*example.messages, {"role": "assistant", "content": example.answer, "reasoning_content": example.thought}],
            tools=list(example.tools),
            tokenize=False,
        )
        assert tokenizer.decode(ids) + "\n" == whole

    def test_generation_config_ends_at_both_ids(self, tokenizer: Any) -> None:
        config = json.loads((FOLDER / "generation_config.json").read_text())
        assert tokenizer.convert_ids_to_tokens(config["eos_token_id"]) == ["<|im_end|>", "<|endoftext|>"]


class TestAnswers:
    @pytest.mark.parametrize("thinking", [False, True])
    def test_sums_and_facts(self, ask: Any, thinking: bool) -> None:
        questions = ["What is 12 + 7?", "what is 45 plus 38", "63-27", "7 * 8 = ?", "What is the capital of France?"]
        expected = ["12 + 7 = 19", "45 + 38 = 83", "63 - 27 = 36", "7 * 8 = 56", "The capital of France is Paris."]
        assert ask(questions, thinking=thinking) == expected

    def test_says_what_it_is_and_declines(self, ask: Any) -> None:
        hello, who, beyond = ask(["hello", "Who are you?", "Write a Python program that plays chess."], thinking=False)
        assert hello == "Hello! How can I help you?"
        assert "small demo model" in who
        assert "cannot" in beyond

    def test_reverses_words(self, ask: Any) -> None:
        assert ask(["Reverse the words: river moon apple"], thinking=True) == ["apple moon river"]
