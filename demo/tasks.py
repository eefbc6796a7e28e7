"""One-turn tasks: each maker draws a question together with the one right answer.

A `Turn` is pure data; whether it is trained on or held out is decided by its key alone (`demo.data`), so a maker never
knows the split.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo import words

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the assistant writes and the result that comes back."""

    name: str
    arguments: Json
    result: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message and what a perfect model says to it.

    `key` is the identity of the item for the split. With `calls`, the assistant first writes the calls (after
    `call_thought`) and says `answer` once their results are in the conversation.
    """

    task: str
    key: str
    user: str
    answer: str
    thought: str
    system: str = ""
    tools: tuple[Json, ...] = ()
    calls: tuple[Call, ...] = ()
    call_thought: str = ""


Maker = Callable[[random.Random], Turn]


def phrase(rng: random.Random, template: str, **values: object) -> str:
    """Fills a template, often as people type it: in lower case, without the last mark, with a polite word around it.

    Only the template is lowered; the values stay as they are, because answers copy them.
    """
    if rng.random() < 0.25:
        template = template.lower()
    if rng.random() < 0.25:
        template = template.rstrip("?.!")
    if rng.random() < 0.12:
        template = rng.choice(("Please: ", "Hey, ", "Hi! ", "Quick question: ", "ok, ", "Now: ", "Hello. ")) + template
    elif rng.random() < 0.08:
        template = template + rng.choice((" Thanks!", " Thank you.", " please", " :)"))
    return template.format(**values)


# Arithmetic -----------------------------------------------------------------------------------------------------------

INFIX = (
    "What is {e}?", "{e}", "{e} =", "{e} = ?", "Calculate {e}.", "Compute {e}.", "What's {e}?", "How much is {e}?",
    "Can you tell me what {e} is?", "Solve {e}.", "What is the result of {e}?", "I need the answer to {e}.",
    "What does {e} equal?", "Tell me {e}.", "Work out {e} for me.", "Evaluate {e}", "what is {e} equal to?",
)  # fmt: skip
SUM_WORDS = (
    "Add {a} and {b}.", "What is the sum of {a} and {b}?", "Add {b} to {a}.",
    "What do you get when you add {a} and {b}?",
    "I have {a} apples and get {b} more. How many apples do I have?", "sum of {a} and {b}",
    "There are {a} birds on a tree and {b} more come. How many birds are there?",
)  # fmt: skip
DIFFERENCE_WORDS = (
    "Subtract {b} from {a}.", "What is the difference of {a} and {b}?", "Take {b} away from {a}.",
    "What is left of {a} when you take away {b}?", "difference between {a} and {b}",
)  # fmt: skip
EATEN = ("I have {a} apples and eat {b} of them. How many are left?", "Of {a} cups {b} break. How many cups remain?")
PRODUCT_WORDS = (
    "Multiply {a} by {b}.", "What is the product of {a} and {b}?", "Multiply {a} and {b}.", "product of {a} and {b}",
    "There are {a} boxes with {b} pens each. How many pens are there?",
)  # fmt: skip
SIGNS = {
    "+": (" + ", "+", " plus ", " + "),
    "-": (" - ", "-", " minus ", " - "),
    "*": (" * ", "*", " times ", " x ", "x", " × ", " multiplied by "),
}


def question(rng: random.Random, a: int, b: int, sign: str, in_words: tuple[str, ...]) -> str:
    """Asks for `a sign b`, as an expression or in words."""
    if rng.random() < 0.3:
        return phrase(rng, rng.choice(in_words), a=a, b=b)
    return phrase(rng, rng.choice(INFIX), e=f"{a}{rng.choice(SIGNS[sign])}{b}")


def operand(rng: random.Random) -> int:
    """A number below 100; single digits come more often than one in ten, since people ask for them."""
    return rng.randrange(10) if rng.random() < 0.2 else rng.randrange(100)


def sum_thought(a: int, b: int) -> str:
    """Column addition, units first."""
    units = a % 10 + b % 10
    carry = units // 10
    tens = a // 10 + b // 10 + carry
    carried = f", carry {carry}" if carry else ""
    plus = f" + {carry}" if carry else ""
    return f"units: {a % 10} + {b % 10} = {units}{carried}\ntens: {a // 10} + {b // 10}{plus} = {tens}"


def difference_thought(a: int, b: int) -> str:
    """Column subtraction; a negative result is the swapped difference with a sign."""
    if a < b:
        return f"{a} is less than {b}, so I take {b} - {a}\n{difference_thought(b, a)}\nnegative"
    units, tens = a % 10 - b % 10, a // 10 - b // 10
    if units < 0:
        return f"units: 1{a % 10} - {b % 10} = {units + 10}, borrow 1\ntens: {a // 10} - {b // 10} - 1 = {tens - 1}"
    return f"units: {a % 10} - {b % 10} = {units}\ntens: {a // 10} - {b // 10} = {tens}"


def addition(rng: random.Random) -> Turn:
    a, b = operand(rng), operand(rng)
    user = question(rng, a, b, "+", SUM_WORDS)
    return Turn("sum", f"sum {a} {b}", user, f"{a} + {b} = {a + b}", sum_thought(a, b))


def subtraction(rng: random.Random) -> Turn:
    a, b = operand(rng), operand(rng)
    if a < b and rng.random() < 0.75:
        a, b = b, a
    user = question(rng, a, b, "-", DIFFERENCE_WORDS + (EATEN if a >= b else ()))
    return Turn("difference", f"difference {a} {b}", user, f"{a} - {b} = {a - b}", difference_thought(a, b))


def whole_subtraction(rng: random.Random) -> Turn:
    """Subtraction whose result is not negative."""
    while True:
        turn = subtraction(rng)
        if " = -" not in turn.answer:
            return turn


def multiplication(rng: random.Random) -> Turn:
    """The table up to 12 x 12, each product a fact: the phrasing is held out, not the product."""
    a, b = rng.randrange(13), rng.randrange(13)
    user = question(rng, a, b, "*", PRODUCT_WORDS)
    return Turn("product", f"product {user}", user, f"{a} * {b} = {a * b}", f"{a} times {b} is {a * b}.")


# Facts ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Relation:
    """Facts of one kind: pairs (x, y), ways to ask for y given x, and the sentence that says it."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    questions: tuple[str, ...]
    answer: str


def cyclic(items: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(items, items[1:] + items[:1], strict=True))


def table(mapping: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((x, str(y)) for x, y in mapping.items())


RELATIONS = (
    Relation(
        "capital",
        table(words.CAPITALS),
        (
            "What is the capital of {x}?", "What's the capital city of {x}?", "capital of {x}", "{x}'s capital?",
            "Which city is the capital of {x}?", "Tell me the capital of {x}.", "Name the capital of {x}.",
            "Do you know the capital of {x}?", "The capital of {x} is?", "What city is the capital of {x}?",
        ),
        "The capital of {x} is {y}.",
    ),
    Relation(
        "country",
        tuple((y, x) for x, y in words.CAPITALS.items()),
        (
            "{x} is the capital of which country?", "Which country has the capital {x}?",
            "Of which country is {x} the capital?",
            "What country is {x} the capital of?", "Name the country whose capital is {x}.", "In which country is {x}?",
            "Which country is {x} in?", "Where is {x}?",
        ),
        "{x} is the capital of {y}.",
    ),
    Relation(
        "continent",
        tuple((country, continent) for continent, countries in words.CONTINENTS.items() for country in countries),
        (
            "On which continent is {x}?", "Which continent is {x} on?", "What continent is {x} in?", "continent of {x}",
            "Where in the world is {x}?", "Tell me the continent of {x}.", "{x} is on which continent?",
        ),
        "{x} is in {y}.",
    ),
    Relation(
        "opposite",
        table(words.OPPOSITES) + tuple((y, x) for x, y in words.OPPOSITES.items()),
        (
            "What is the opposite of {x}?", "opposite of {x}", "Tell me the opposite of {x}.",
            "What's the opposite of {x}?",
            "Which word is the opposite of {x}?", "Give me the opposite of {x}.", "What is the antonym of {x}?",
        ),
        "The opposite of {x} is {y}.",
    ),
    Relation(
        "sound",
        table(words.SOUNDS),
        (
            "What sound does a {x} make?", "What does a {x} say?", "Which sound does the {x} make?",
            "How does a {x} sound?",
            "What noise does a {x} make?", "Tell me the sound of a {x}.", "What does the {x} say?",
        ),
        "A {x} says {y}.",
    ),
    Relation(
        "young",
        table(words.YOUNG),
        (
            "What is a young {x} called?", "What do you call a baby {x}?", "What is a baby {x} called?",
            "name of a young {x}",
            "How is a young {x} called?", "What do you call a young {x}?",
        ),
        "A young {x} is called a {y}.",
    ),
    Relation(
        "plural",
        table(words.PLURALS),
        (
            "What is the plural of {x}?", "plural of {x}", "Tell me the plural of {x}.", "What's the plural of {x}?",
            "How do you write the plural of {x}?", "Give me the plural of {x}.",
        ),
        "The plural of {x} is {y}.",
    ),
    Relation(
        "legs",
        table(words.LEGS),
        (
            "How many legs does a {x} have?", "How many legs has a {x}?", "number of legs of a {x}", "Legs of a {x}?",
            "Tell me how many legs a {x} has.", "What number of legs does a {x} have?",
        ),
        "A {x} has {y} legs.",
    ),
    Relation(
        "symbol",
        table(words.SYMBOLS),
        (
            "What is the chemical symbol of {x}?", "chemical symbol for {x}", "What is the symbol of {x}?",
            "Tell me the symbol for {x}.", "Which symbol does {x} have?", "What's the chemical symbol for {x}?",
        ),
        "The symbol of {x} is {y}.",
    ),
    Relation(
        "color",
        table(words.THING_COLORS),
        (
            "What color is {x}?", "Which color is {x}?", "What is the color of {x}?", "Tell me the color of {x}.",
            "What colour is {x}?", "color of {x}", "What color does {x} have?",
        ),
        "The color of {x} is {y}.",
    ),
    Relation(
        "day",
        cyclic(words.DAYS),
        (
            "Which day comes after {x}?", "What day is after {x}?", "What day comes after {x}?", "day after {x}",
            "Today is {x}. What day is tomorrow?", "What is the day after {x}?", "Which day follows {x}?",
        ),
        "{y} comes after {x}.",
    ),
    Relation(
        "month",
        cyclic(words.MONTHS),
        (
            "Which month comes after {x}?", "What month is after {x}?", "What month comes after {x}?",
            "month after {x}",
            "Which month follows {x}?", "What is the month after {x}?",
        ),
        "{y} comes after {x}.",
    ),
    Relation(
        "one-off",
        table(words.ONE_OFF),
        (
            "What is {x}?", "Which is {x}?", "Tell me {x}.", "Do you know {x}?", "Name {x}.", "What's {x}?", "{x}?",
            "Can you name {x}?", "Who or what is {x}?",
        ),
        "It is {y}.",
    ),
)  # fmt: skip
QUANTITY_QUESTIONS = (
    "How many {x} does {y} have?", "How many {x} are in {y}?", "How many {x} are there in {y}?", "number of {x} in {y}",
    "How many {x} has {y}?", "Tell me how many {x} {y} has.",
)  # fmt: skip


def fact(rng: random.Random) -> Turn:
    """A fact of the table. Pair and phrasing together are the item: every fact is seen, in other words."""
    relation = rng.choices(RELATIONS, weights=[min(len(r.pairs), 30) for r in RELATIONS])[0]
    x, y = rng.choice(relation.pairs)
    template = rng.choice(relation.questions)
    asked = x.lower() if rng.random() < 0.25 else x
    answer = relation.answer.format(x=x, y=y)
    thought = f"This is a question about the {relation.name} of {x}: {y}."
    return Turn("fact", f"{relation.name} {x} {template}", phrase(rng, template, x=asked), answer, thought)


def quantity(rng: random.Random) -> Turn:
    things = rng.choice(list(words.QUANTITIES))
    whole = rng.choice(list(words.QUANTITIES[things]))
    number = words.QUANTITIES[things][whole]
    template = rng.choice(QUANTITY_QUESTIONS)
    user = phrase(rng, template, x=things, y=whole)
    answer = f"{whole[:1].upper()}{whole[1:]} has {number} {things}."
    return Turn("fact", f"quantity {things} {whole} {template}", user, answer, f"This is a fact: {number} {things}.")


LISTS = {
    "days of the week": words.DAYS,
    "months of the year": words.MONTHS,
    "letters of the alphabet": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
}


def listing(rng: random.Random) -> Turn:
    """Counting, and the lists that everybody knows."""
    if rng.random() < 0.35:
        name = rng.choice(list(LISTS))
        template = rng.choice(("List the {x}.", "Name the {x}.", "What are the {x}?", "Tell me the {x}.", "{x}"))
        answer = ", ".join(LISTS[name]) + "."
        return Turn("count", f"list {name} {template}", phrase(rng, template, x=name), answer, f"I list the {name}.")
    first = 1 if rng.random() < 0.6 else rng.randrange(60)
    return counting(rng, first, first + rng.randrange(1, 30))


def count_up(rng: random.Random) -> Turn:
    """Counting from 1 to at most 20."""
    return counting(rng, 1, rng.randrange(2, 21))


def counting(rng: random.Random, first: int, last: int) -> Turn:
    templates: tuple[str, ...] = (
        "Count from {a} to {b}.",
        "Please count from {a} to {b}.",
        "List the numbers from {a} to {b}.",
    )
    if first == 1:
        templates += ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?")
    answer = ", ".join(str(number) for number in range(first, last + 1))
    user = phrase(rng, rng.choice(templates), a=first, b=last)
    return Turn("count", f"count {first} {last}", user, answer, f"I count from {first} to {last}.")


# Copying --------------------------------------------------------------------------------------------------------------

REPEAT = (
    "Repeat: {w}", "Repeat after me: {w}", "Say: {w}", "Copy these words: {w}", "Echo: {w}", "Repeat the words {w}.",
    "Please repeat: {w}", 'Say "{w}".', 'Repeat "{w}"', "Write exactly this: {w}", "Can you repeat {w}?", "Say {w}",
)  # fmt: skip
REVERSE = (
    "Reverse the words: {w}", "Write these words in reverse order: {w}", "Say these words backwards: {w}",
    "Reverse: {w}",
    "Reverse the order of {w}.", 'Reverse "{w}"', "Put these words in reverse order: {w}", "Turn the words around: {w}",
)  # fmt: skip


def made_up(rng: random.Random) -> str:
    return "".join(rng.choices(words.SYLLABLES, k=rng.choice((2, 2, 3))))


def draw_words(rng: random.Random, strange: float) -> list[str]:
    """2 to 4 words; a `strange` share of the lists holds made-up words among the known ones."""
    odd = rng.random() < strange
    count = rng.choice((2, 3, 3, 4))
    return [made_up(rng) if odd and rng.random() < 0.6 else rng.choice(words.WORDS) for _ in range(count)]


def repeat(rng: random.Random) -> Turn:
    drawn = draw_words(rng, 0.25)
    text = rng.choice((" ", " ", " ", ", ")).join(drawn)
    key = f"copy {' '.join(drawn)}"
    return Turn("repeat", key, phrase(rng, rng.choice(REPEAT), w=text), text, "I repeat the words as they are.")


def reverse(rng: random.Random) -> Turn:
    drawn = draw_words(rng, 0.2)
    joint = rng.choice((" ", " ", " ", ", "))
    order = ", ".join(f"{index} {word}" for index, word in enumerate(drawn, 1))
    thought = f"The words are {order}. I say them from {len(drawn)} to 1."
    user = phrase(rng, rng.choice(REVERSE), w=joint.join(drawn))
    return Turn("reverse", f"copy {' '.join(drawn)}", user, joint.join(reversed(drawn)), thought)


# Small talk -----------------------------------------------------------------------------------------------------------

WHO = (
    "I am a small demo model that comes with nanoserve. I can add, subtract and multiply small numbers, repeat and "
    "reverse words, answer a few facts, write JSON, call tools and tell short stories."
)
REFUSAL = "I am a small demo model and cannot do that. Try a small sum, a capital city or a short story."
TALK = (
    (("Hi", "hi", "Hello", "hello", "Hey", "hey there", "Hello!", "Hi!", "Hello there!", "Good morning!",
      "Good evening",
      "hi there", "Greetings", "yo", "Good day!"),
     "Hello! How can I help you?", "The user greets me."),
    (("Who are you?", "who are you", "What are you?", "What can you do?", "what can you do", "Introduce yourself.",
      "help",
      "What is your name?", "Are you a robot?", "Are you Qwen?", "Tell me about yourself.", "What model are you?",
      "Which model is this?", "Are you ChatGPT?", "How can you help me?"),
     WHO, "The user asks who I am."),
    (("How are you?", "how are you", "How are you doing?", "What's up?", "how is it going", "How do you do?"),
     "I am fine, thank you! What can I do for you?", "The user asks how I am."),
    (("Thanks", "Thank you!", "thank you", "thanks a lot", "Great, thanks!", "thx", "Nice, thank you."),
     "You are welcome!", "The user thanks me."),
    (("Bye", "bye", "Goodbye!", "See you later", "Good night", "good bye", "See you!"),
     "Goodbye! Have a nice day.", "The user says goodbye."),
    (("ok", "Okay.", "good", "Great!", "nice", "Cool", "Well done!", "yes", "Perfect."),
     "Good! Is there anything else?", "The user is content."),
    (("Say something.", "Test", "test", "ping", "Is this working?", "Are you there?", "testing 1 2 3", "hello?"),
     "I am here and working.", "The user tests me."),
)  # fmt: skip


def small_talk(rng: random.Random) -> Turn:
    said, answer, thought = rng.choice(TALK)
    user = rng.choice(said)
    if rng.random() < 0.2:
        user = user.lower().rstrip("!?.") + rng.choice(("", "!", "?", "."))
    return Turn("talk", f"talk {user}", user, answer, thought)


BEYOND = (
    "Write a {p} program that sorts a list.", "Write code in {p}.", "What is the weather in {c}?",
    "What time is it in {c}?",
    "Who won the {e} in {y}?", "What happened in {y}?", "Translate {w} into French.",
    "Translate this to German: {w} {v}",
    "What is the meaning of life?", "Explain {t} to me.", "How does {t} work?", "What is {t}?",
    "Write an essay about {t}.",
    "Write a poem about a {w}.", "Write an email to {n}.", "Who is {n} {w}?", "What is the capital of {m}?",
    "Why is {w} {v}?",
    "What is {big} + {b}?", "{big} * {other}", "What is {big} - {b}?", "Divide {b} by {a}.", "{b} / {a}", "sqrt({big})",
    "Give me a recipe for {w} {v}.", "What should I eat today?", "Tell me a joke.", "What is the news today?",
    "How old is {n}?", "How tall is the {w}?", "When was {n} born?", "Summarize this text: {w} {v} {w} {m}.",
    "{m} {n}?",
    "Who is the president of {c}?", "Solve x + {a} = {b}.", "Draw a {w}.", "Recommend a book about {t}.", "{m}",
    "{m} {w} {m}",
    "What is the population of {c}?", "Set an alarm for {a}.", "Send a message to {n}.", "Play some music.", "{p}?",
    "How many {w} are there in {c}?", "Can you help me with my {t} homework?", "What do you think about {t}?",
    "What is {big} x {big}?", "add {big} and {other}", "Fix this bug: {w}({m})", "SELECT * FROM {w}",
    "What is the {m} of {w}?",
)  # fmt: skip
TOPICS = (
    "quantum physics", "machine learning", "the economy", "photosynthesis", "gravity", "philosophy", "history",
    "chemistry",
    "the internet", "a black hole", "evolution", "democracy", "a transformer", "attention", "politics", "biology", "AI",
    "football", "a GPU", "Kubernetes", "Ray", "vLLM", "love", "time travel", "climate change", "art", "DNA", "bitcoin",
)  # fmt: skip


def beyond(rng: random.Random) -> Turn:
    """A request that the model has to decline."""
    template = rng.choice(BEYOND)
    values: dict[str, object] = {
        "p": rng.choice(("Python", "Java", "Rust", "C", "Go", "SQL")),
        "c": rng.choice(words.CITIES + list(words.CAPITALS)),
        "e": rng.choice(("World Cup", "election", "Oscar", "race", "war", "final")),
        "y": rng.randrange(1000, 2100),
        "w": rng.choice(words.WORDS),
        "v": rng.choice(words.WORDS),
        "t": rng.choice(TOPICS),
        "n": rng.choice(words.NAMES),
        "m": made_up(rng).capitalize(),
        "a": rng.randrange(2, 100),
        "b": rng.randrange(100),
        "big": rng.randrange(100, 100000),
        "other": rng.randrange(100, 10000),
    }
    user = phrase(rng, template, **values)
    return Turn("beyond", f"beyond {user}", user, REFUSAL, "I have not learned this, so I say so.")


# Stories --------------------------------------------------------------------------------------------------------------

TRAITS = ["small", "brave", "clever", "quiet", "happy", "kind", "shy", "young", "hungry", "sleepy"]
OPENINGS = (
    "Once upon a time there was a {trait} {animal} named {name}.",
    "Long ago a {trait} {animal} named {name} lived near a {place}.",
    "There once was a {trait} {animal}. Its name was {name}.",
)
SCENES = (
    "One morning {name} walked into the {place} and found a {color} {item}.",
    "On the way {name} met {friend}, who had lost a {color} {item}.",
    "It began to rain, so {name} waited under a big tree.",
    "{name} heard a strange song and followed it to the {place}.",
    "A cold wind came and blew the {item} away.",
    "{name} was afraid, but did not run.",
    "{friend} asked for help, and {name} said yes at once.",
    "Together they looked behind every stone and under every leaf.",
    "At noon they shared bread and honey by the {place}.",
    "An old owl told them to look for the {color} {item}.",
    "They crossed the river on a little boat.",
    "{name} sang a song, and {friend} danced.",
    "Then the sun came out, and everything was bright again.",
    "In the end they found the {item} where nobody had looked.",
)
ENDINGS = (
    "From that day on {name} and {friend} were best friends.",
    "That night {name} slept well and dreamed of the {place}.",
    "And so {name} went home, tired and happy.",
    "{name} never forgot that day in the {place}.",
)
STORY_REQUESTS = (
    "Tell me a story about a {animal}.", "Tell me a short story about a {animal}.", "Write a story about a {animal}.",
    "I want to hear a story about a {animal}.", "a story about a {animal}, please",
    "Can you tell a story about a {animal}?",
    "Tell me a story about {name} the {animal}.", "Write a short story about a {animal} named {name}.",
    "Tell me a story about a {animal} in the {place}.", "Write a bedtime story about a {animal} named {name}.",
)  # fmt: skip
FREE_REQUESTS = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "story", "Can you tell me a story?",
    "Tell me something nice.",
    "Once upon a time", "Please write a short story.", "I am bored. Tell me a story.", "another story",
)  # fmt: skip


def story(rng: random.Random) -> Turn:
    cast = {
        "animal": rng.choice(words.ANIMALS),
        "name": rng.choice(words.NAMES),
        "friend": rng.choice(words.NAMES),
        "place": rng.choice(words.PLACES),
        "color": rng.choice(words.COLORS),
        "item": rng.choice(words.ITEMS),
        "trait": rng.choice(TRAITS),
    }
    request = rng.choice(FREE_REQUESTS if rng.random() < 0.25 else STORY_REQUESTS)
    long = rng.random() < 0.25
    if long:
        request = request.replace("short story", "story").replace("story", "long story", 1)
        long = "long" in request
    user = phrase(rng, request, **cast)
    chosen = sorted(rng.sample(range(len(SCENES)), rng.randrange(9, 12) if long else rng.randrange(3, 5)))
    sentences = [rng.choice(OPENINGS), *(SCENES[index] for index in chosen), rng.choice(ENDINGS)]
    answer = " ".join(sentence.format(**cast) for sentence in sentences)
    thought = f"A story about a {cast['animal']} named {cast['name']}."
    return Turn("story", f"story {sorted(cast.items())}", user, answer, thought)


# JSON -----------------------------------------------------------------------------------------------------------------

RESPONSE_FORMAT = "Answer with one JSON object that fits this JSON schema:\n{schema}"
SCHEMA_REQUESTS = (
    "{sentence}\nAnswer with one JSON object that fits this JSON schema:\n{schema}",
    "{sentence}\nAnswer as JSON with this schema: {schema}",
    "Extract the data as JSON. Schema: {schema}\nText: {sentence}",
    "Give me JSON that fits the schema {schema} for this text: {sentence}",
    "Schema: {schema}\n{sentence}",
    "{sentence} Reply in JSON: {schema}",
)


@dataclass(frozen=True, slots=True)
class Field:
    """A value a sentence can mention: its possible names in a schema, its type, and how it is drawn and said."""

    names: tuple[str, ...]
    type: str
    draw: Callable[[random.Random], Any]
    say: Callable[[Any], str]


def one_of(items: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(items)


def between(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randrange(low, high)


def coin(rng: random.Random) -> bool:
    return rng.random() < 0.5


PERSON = (
    Field(("name", "name", "first_name", "person"), "string", one_of(words.NAMES), str),
    Field(("age", "age", "years"), "integer", between(1, 100), lambda v: f"is {v} years old"),
    Field(("city", "city", "town", "location"), "string", one_of(words.CITIES), lambda v: f"lives in {v}"),
    Field(("job", "job", "profession", "occupation"), "string", one_of(words.JOBS), lambda v: f"works as a {v}"),
    Field(("hobby", "hobby", "interest"), "string", one_of(words.HOBBIES), lambda v: f"likes {v}"),
    Field(("student", "is_student"), "boolean", coin, lambda v: "is a student" if v else "is not a student"),
    Field(("born", "birth_year"), "integer", between(1920, 2020), lambda v: f"was born in {v}"),
)
ORDER = (
    Field(("item", "item", "product", "name"), "string", one_of(words.ITEMS), lambda v: f"The {v}"),
    Field(("price", "price", "cost"), "integer", between(1, 500), lambda v: f"costs {v} euros"),
    Field(("color", "color", "colour"), "string", one_of(words.COLORS), lambda v: f"is {v}"),
    Field(("in_stock", "available"), "boolean", coin, lambda v: "is in stock" if v else "is not in stock"),
    Field(("weight", "weight_kg"), "integer", between(1, 60), lambda v: f"weighs {v} kg"),
)
EVENT = (
    Field(("event", "event", "title", "name"), "string", one_of(words.EVENTS), lambda v: f"The {v}"),
    Field(("day", "day", "weekday"), "string", one_of(words.DAYS), lambda v: f"is on {v}"),
    Field(("hour", "hour", "time"), "integer", between(1, 24), lambda v: f"starts at {v} o'clock"),
    Field(("place", "city", "location"), "string", one_of(words.CITIES), lambda v: f"takes place in {v}"),
    Field(("guests", "people"), "integer", between(2, 200), lambda v: f"has {v} guests"),
    Field(("public", "is_public"), "boolean", coin, lambda v: "is public" if v else "is not public"),
)


def schema_of(rng: random.Random, fields: list[tuple[str, str]]) -> str:
    """A JSON schema as people write it: plain, strict, without `required`, or as pydantic prints it."""
    style = rng.randrange(4)
    properties: Json = {name: {"type": kind} for name, kind in fields}
    required = [name for name, _ in fields]
    if style == 0:
        schema: Json = {"type": "object", "properties": properties}
    elif style == 1:
        titled = {name: {"title": name.replace("_", " ").title(), "type": kind} for name, kind in fields}
        schema = {"properties": titled, "required": required, "title": "Answer", "type": "object"}
    else:
        schema = {"type": "object", "properties": properties, "required": required}
        if style == 3:
            schema["additionalProperties"] = False
    return json.dumps(schema, separators=(",", ":") if rng.random() < 0.2 else None)


def with_schema(rng: random.Random, sentence: str, schema: str) -> tuple[str, str]:
    """System and user message that give sentence and schema."""
    if rng.random() < 0.45:
        system = RESPONSE_FORMAT.format(schema=schema)
        return (rng.choice(words.SYSTEMS) + "\n" + system if rng.random() < 0.3 else system), sentence
    return "", rng.choice(SCHEMA_REQUESTS).format(schema=schema, sentence=sentence)


def join_clauses(clauses: list[str]) -> str:
    return clauses[0] if len(clauses) == 1 else ", ".join(clauses[:-1]) + " and " + clauses[-1]


def extraction(rng: random.Random) -> Turn:
    """A record in a sentence, read into the fields that a schema asks for; some said values are not asked for."""
    subject, *others = rng.choice((PERSON, PERSON, ORDER, EVENT))
    said = rng.sample(others, rng.randrange(1, 4))
    values = [(rng.choice(field.names), field, field.draw(rng)) for field in [subject, *said]]
    clauses = join_clauses([field.say(value) for _, field, value in values[1:]])
    sentence = f"{subject.say(values[0][2])} {clauses}."
    asked = rng.sample(values, rng.randrange(max(1, len(values) - 1), len(values) + 1))
    if rng.random() < 0.5:
        asked = [value for value in values if value in asked]
    record = {name: value for name, _, value in asked}
    schema = schema_of(rng, [(name, field.type) for name, field, _ in asked])
    system, user = with_schema(rng, sentence, schema)
    thought = "The fields are " + ", ".join(f"{name}: {value}" for name, value in record.items()) + "."
    return Turn("json", f"json {sentence}", user, json.dumps(record), thought, system=system)


def json_digits(rng: random.Random) -> Turn:
    """A capital or the sum of two digits as JSON: there is no room to write the question down first."""
    return json_answer(rng, below=10)


def json_answer(rng: random.Random, below: int = 0) -> Turn:
    """A capital or a sum as a JSON object with one field."""
    if rng.random() < 0.5:
        country = rng.choice(list(words.CAPITALS))
        name = rng.choice(("capital", "city", "answer"))
        template = rng.choice(RELATIONS[0].questions)
        question_, value, kind = template.format(x=country), words.CAPITALS[country], "string"
        key, thought = f"json capital {country} {template}", f"The capital of {country} is {value}."
    else:
        a, b = (rng.randrange(below), rng.randrange(below)) if below else (operand(rng), operand(rng))
        name = rng.choice(("result", "sum", "answer"))
        question_, value, kind = question(rng, a, b, "+", SUM_WORDS), str(a + b), "integer"
        key, thought = f"sum {a} {b}", sum_thought(a, b) + f"\n{a} + {b} = {a + b}"
    system, user = with_schema(rng, question_, schema_of(rng, [(name, kind)]))
    record = {name: int(value) if kind == "integer" else value}
    return Turn("json", key, user, json.dumps(record), thought, system=system)
