"""Synthetic chat data of the demo model.

Everything is drawn from a seeded generator. An item is trained on or held out by the hash of its key alone, so the two
splits are disjoint whatever the seeds are.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from demo import tasks, words
from demo.tasks import Json, Maker, Turn
from demo.tools import idle_tools, tool_turn

Message = dict[str, Any]


class Split(Enum):
    """Which side of the hash an item lies on."""

    TRAIN = "train"
    HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation up to the assistant's turn, and what it has to write there.

    `answer` is the text after the thoughts, tool calls included, exactly as it is checked.
    """

    task: str
    messages: tuple[Message, ...]
    tools: tuple[Json, ...]
    thinking: bool
    thought: str
    answer: str

    def target(self) -> str:
        """The text that the model writes: in thinking mode with the think block that Qwen3 writes itself."""
        return f"<think>\n{self.thought}\n</think>\n\n{self.answer}" if self.thinking else self.answer


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often a task is the last turn of a conversation, and how many turns come before it."""

    tasks: dict[Maker, float]
    past_weights: tuple[int, ...]
    past_counts: tuple[int, ...]
    long_past: range


# Tasks whose answers are short enough for the past of a conversation.
PAST: dict[Maker, float] = {
    tasks.addition: 6, tasks.subtraction: 6, tasks.multiplication: 3, tasks.fact: 6, tasks.repeat: 3, tasks.reverse: 3,
    tasks.small_talk: 2, tasks.beyond: 1, tasks.story: 0.2, tasks.quantity: 0.5,
}  # fmt: skip


def split_of(key: str) -> Split:
    """One item in ten is held out."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return Split.HELD_OUT if int.from_bytes(digest, "big") % 10 == 0 else Split.TRAIN


def draw(rng: random.Random, maker: Maker, split: Split) -> Turn:
    """Draws until an item of the split comes; only small talk, too small to be split, is taken as it comes."""
    while True:
        turn = maker(rng)
        if turn.task == "talk" or split_of(turn.key) is split:
            return turn


def weighted(rng: random.Random, mixture: dict[Maker, float]) -> Maker:
    return rng.choices(list(mixture), weights=list(mixture.values()))[0]


def said(turn: Turn) -> list[Message]:
    """A finished turn without tools, as past."""
    return [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]


def tool_messages(rng: random.Random, turn: Turn, thinking: bool) -> list[Message]:
    """The assistant's calls and their results. Clients may or may not send the thoughts back."""
    calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls]
    message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    if thinking and rng.random() < 0.5:
        message["reasoning_content"] = turn.call_thought
    return [message, *({"role": "tool", "content": call.result} for call in turn.calls)]


def calls_text(turn: Turn) -> str:
    """Tool calls as the chat template renders them."""
    bodies = (json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) for c in turn.calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def past(rng: random.Random, split: Split, mixture: Mixture, long: bool) -> list[Message]:
    """Earlier turns: none, a few, or in a long conversation many."""
    few = rng.choices(mixture.past_counts, weights=mixture.past_weights)[0] if not long else 0
    count = rng.randrange(mixture.long_past.start, mixture.long_past.stop) if long else few
    return [message for _ in range(count) for message in said(draw(rng, weighted(rng, PAST), split))]


def system_message(rng: random.Random, turn: Turn) -> list[Message]:
    content = turn.system or (rng.choice(words.SYSTEMS) if rng.random() < 0.35 else "")
    return [{"role": "system", "content": content}] if content else []


def follow_up(rng: random.Random, split: Split) -> tuple[list[Message], Turn]:
    """A question that only makes sense after the one before it."""
    return rng.choice((and_capital, add_to_that, what_is_my_name))(rng, split)


def and_capital(rng: random.Random, split: Split) -> tuple[list[Message], Turn]:
    first, second = rng.sample(list(words.CAPITALS), 2)
    template = rng.choice(
        ("And {x}?", "and of {x}?", "And the capital of {x}?", "What about {x}?", "and {x}", "And for {x}?")
    )
    asked = rng.choice(tasks.RELATIONS[0].questions).format(x=first)
    before = Turn("fact", "", asked, f"The capital of {first} is {words.CAPITALS[first]}.", "")
    thought = f"This is a question about the capital of {second}: {words.CAPITALS[second]}."
    answer = f"The capital of {second} is {words.CAPITALS[second]}."
    return said(before), Turn("follow-up", f"capital {first} {second}", template.format(x=second), answer, thought)


def add_to_that(rng: random.Random, split: Split) -> tuple[list[Message], Turn]:
    while True:
        before = draw(rng, tasks.addition, split)
        a, b = int(before.answer.rsplit(" ", 1)[1]), rng.randrange(1, 50)
        if a < 100 and split_of(f"sum {a} {b}") is split:
            break
    template = rng.choice(
        ("Add {b} to that.", "And plus {b}?", "Now add {b}.", "plus {b}", "And {b} more?", "add {b} to the result")
    )
    turn = Turn("follow-up", f"sum {a} {b}", template.format(b=b), f"{a} + {b} = {a + b}", tasks.sum_thought(a, b))
    return said(before), turn


def what_is_my_name(rng: random.Random, split: Split) -> tuple[list[Message], Turn]:
    name = rng.choice(words.NAMES) if rng.random() < 0.8 else tasks.made_up(rng).capitalize()
    told = rng.choice(
        ("My name is {n}.", "I am {n}.", "Hi, I'm {n}.", "Hello, my name is {n}.", "Call me {n}.")
    ).format(n=name)
    asked = rng.choice(
        ("What is my name?", "Who am I?", "Do you remember my name?", "what's my name", "How am I called?")
    )
    before = Turn("talk", "", told, f"Nice to meet you, {name}!", "")
    between = said(draw(rng, weighted(rng, PAST), split)) if rng.random() < 0.5 else []
    turn = Turn("follow-up", f"name {name} {asked}", asked, f"Your name is {name}.", f"The user is called {name}.")
    return said(before) + between, turn


def meeting(rng: random.Random) -> Turn:
    """The user says a name."""
    name = rng.choice(words.NAMES) if rng.random() < 0.8 else tasks.made_up(rng).capitalize()
    told = rng.choice(("My name is {n}.", "I am {n}.", "Hi, I'm {n}.", "Hello, my name is {n}.", "Call me {n}."))
    answer = f"Nice to meet you, {name}!"
    return Turn("talk", f"meeting {name}", tasks.phrase(rng, told, n=name), answer, f"The user is called {name}.")


# Most of the training: many earlier turns, each of them a learned answer as well.
BASE = Mixture(
    {
        tasks.addition: 14,
        tasks.subtraction: 14,
        tasks.multiplication: 6,
        tasks.fact: 12,
        tasks.quantity: 1.5,
        tasks.listing: 2,
        tasks.repeat: 7,
        tasks.reverse: 8,
        tasks.small_talk: 3,
        tasks.beyond: 6,
        tasks.story: 4,
        tasks.extraction: 10,
        tasks.json_answer: 4,
        tool_turn: 13,
        meeting: 1,
    },
    past_counts=(0, 1, 2, 3, 5, 8),
    past_weights=(35, 12, 13, 15, 15, 10),
    long_past=range(8, 40),
)
# Then what is learned last, in conversations as short as most are.
FOCUS = Mixture(
    {
        tasks.addition: 10,
        tasks.subtraction: 15,
        tasks.multiplication: 3,
        tasks.fact: 8,
        tasks.quantity: 0.5,
        tasks.listing: 1,
        tasks.repeat: 12,
        tasks.reverse: 15,
        tasks.small_talk: 2,
        tasks.beyond: 4,
        tasks.story: 2,
        tasks.extraction: 20,
        tasks.json_answer: 8,
        tool_turn: 26,
        meeting: 1,
    },
    past_counts=(0, 1, 2, 3),
    past_weights=(60, 20, 14, 6),
    long_past=range(4, 12),
)


# The end, and what is measured: the tasks cut down to what a model of this size gets right.
FINAL = Mixture(
    {
        tasks.addition: 11,
        tasks.whole_subtraction: 18,
        tasks.multiplication: 3,
        tasks.fact: 9,
        tasks.quantity: 0.5,
        tasks.listing: 0.5,
        tasks.count_up: 4,
        tasks.repeat: 8,
        tasks.reverse: 15,
        tasks.small_talk: 3,
        tasks.beyond: 4,
        tasks.story: 3,
        tasks.extraction: 18,
        tasks.json_digits: 7,
        tool_turn: 24,
        meeting: 1,
    },
    past_counts=(0, 1, 2, 3),
    past_weights=(60, 20, 14, 6),
    long_past=range(4, 12),
)


def finish(rng: random.Random, turn: Turn, before: list[Message], tools: tuple[Json, ...], thinking: bool) -> Example:
    """Ends the conversation at one of the places where the assistant has to write."""
    messages = [*system_message(rng, turn), *before, {"role": "user", "content": turn.user}]
    if not turn.calls:
        return Example(turn.task, tuple(messages), tools, thinking, turn.thought, turn.answer)
    if rng.random() < 0.6:
        return Example("tool call", tuple(messages), turn.tools, thinking, turn.call_thought, calls_text(turn))
    messages += tool_messages(rng, turn, thinking)
    return Example("tool answer", tuple(messages), turn.tools, thinking, turn.thought, turn.answer)


def example_of(rng: random.Random, mixture: Mixture, split: Split, thinking: bool) -> Example:
    """A whole conversation that ends in an item of the mixture."""
    turn = draw(rng, weighted(rng, mixture.tasks), split)
    tools = idle_tools(rng) if not turn.system and rng.random() < 0.07 else ()
    return finish(rng, turn, past(rng, split, mixture, rng.random() < 0.01), tools, thinking)


def examples(rng: random.Random, split: Split, mixture: Mixture) -> Iterator[Example]:
    """The endless stream of the mixture, nearly half of it in thinking mode; the state of `rng` is the stream's."""
    while True:
        thinking = rng.random() < 0.45
        if rng.random() < 0.04:
            before, turn = follow_up(rng, split)
            yield finish(rng, turn, before, (), thinking)
        else:
            yield example_of(rng, mixture, split, thinking)
