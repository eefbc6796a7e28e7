"""Tool tasks: functions under many names, the request, the call in Qwen's format, the result and the answer to it.

Names of functions and parameters vary from item to item, so the model learns to read them in the system turn instead of
knowing them by heart.
"""

import json
import random
from collections.abc import Callable

from demo import words
from demo.tasks import INFIX, SUM_WORDS, Call, Json, Turn, draw_words, phrase

ToolMaker = Callable[[random.Random], Turn]


def function(
    rng: random.Random,
    name: str,
    description: str,
    parameters: dict[str, Json],
    optional: dict[str, Json] | None = None,
) -> Json:
    """A tool as the chat completions API takes it; descriptions and strictness come and go."""
    properties = {
        parameter: schema if rng.random() < 0.6 else {k: v for k, v in schema.items() if k != "description"}
        for parameter, schema in {**parameters, **(optional or {})}.items()
    }
    schema: Json = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        schema["required"] = list(parameters)
    if rng.random() < 0.15:
        schema["additionalProperties"] = False
    body: Json = {"name": name, "description": description, "parameters": schema}
    if rng.random() < 0.1:
        del body["description"]
    if rng.random() < 0.1:
        body["strict"] = True
    return {"type": "function", "function": body}


def text(description: str) -> Json:
    return {"type": "string", "description": description}


def integer(description: str) -> Json:
    return {"type": "integer", "description": description}


def place_word(rng: random.Random) -> str:
    return rng.choice(("city", "location", "city", "location", "place", "town"))


def result_json(rng: random.Random, **values: object) -> str:
    """A result as servers send it: JSON, with spaces or without."""
    return json.dumps(values, separators=(",", ":") if rng.random() < 0.2 else None)


def weather(rng: random.Random) -> Turn:
    name = rng.choice(
        ("get_weather", "get_weather", "get_current_weather", "weather", "check_weather", "weather_lookup")
    )
    where = place_word(rng)
    says = rng.choice(
        ("Get the current weather for a city.", "Get the weather", "Returns the weather in a given location.")
    )
    has_unit = rng.random() < 0.35
    unit: dict[str, Json] = {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}} if has_unit else {}
    tool = function(rng, name, says, {where: text(rng.choice(("The city", "The name of the city")))}, unit)
    cities = rng.sample(words.CITIES, 2 if rng.random() < 0.15 else 1)
    wanted = rng.choice(("celsius", "fahrenheit")) if has_unit and rng.random() < 0.5 else ""
    template = rng.choice((
        "What is the weather in {c}?", "What's the weather like in {c}?", "How is the weather in {c}?",
        "weather in {c}",
        "Tell me the weather in {c}.", "Is it raining in {c}?", "What is the weather in {c} today?",
        "Is it cold in {c}?",
        "How warm is it in {c}?", "What is the temperature in {c}?", "Please check the weather in {c}.",
    ))  # fmt: skip
    if wanted:
        template = template.rstrip("?.") + f" in {wanted}?"
    calls, said = [], []
    for city in cities:
        degrees, condition = rng.randrange(-9, 40), rng.choice(words.CONDITIONS)
        keys = rng.choice((("temperature", "condition"), ("temperature", "conditions"), ("temp", "weather")))
        result = result_json(rng, **{keys[0]: degrees, keys[1]: condition})
        if rng.random() < 0.3:
            result = rng.choice(
                (f"{condition}, {degrees} degrees", f"{degrees} degrees and {condition}", f"{degrees}C, {condition}")
            )
        calls.append(Call(name, {where: city, **({"unit": wanted} if wanted else {})}, result))
        said.append(f"It is {condition} in {city} with {degrees} degrees.")
    user = phrase(rng, template, c=" and ".join(cities))
    return turn("weather", user, " ".join(said), (tool,), calls)


def clock(rng: random.Random) -> Turn:
    name = rng.choice(("get_time", "get_current_time", "current_time", "clock", "get_time"))
    where = place_word(rng)
    tool = function(
        rng, name, rng.choice(("Get the current time in a city.", "Get the time")), {where: text("The city")}
    )
    city = rng.choice(words.CITIES)
    now = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    template = rng.choice((
        "What time is it in {c}?", "What is the time in {c}?", "Tell me the time in {c}.", "time in {c}",
        "How late is it in {c}?",
        "What's the current time in {c}?", "Which time is it in {c}?",
    ))  # fmt: skip
    result = now if rng.random() < 0.3 else result_json(rng, **{rng.choice(("time", "time", "current_time")): now})
    return turn(
        "clock", phrase(rng, template, c=city), f"It is {now} in {city}.", (tool,), [Call(name, {where: city}, result)]
    )


def calculator(rng: random.Random) -> Turn:
    name = rng.choice(("calculate", "calculator", "compute", "evaluate", "calculate"))
    parameter = rng.choice(("expression", "expression", "expr", "formula"))
    tool = function(
        rng, name, rng.choice(("Evaluate an arithmetic expression.", "Calculate")), {parameter: text("The expression")}
    )
    sign = rng.choice("+-*")
    digits = rng.choice((10, 100, 1000, 10000))
    a, b = rng.randrange(digits), rng.randrange(rng.choice((10, 100, digits)))
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    expression = f"{a} {sign} {b}"
    said = {"+": " plus ", "-": " minus ", "*": " times "}[sign] if rng.random() < 0.2 else f" {sign} "
    user = phrase(rng, rng.choice(INFIX), e=f"{a}{said}{b}")
    result = str(value) if rng.random() < 0.4 else result_json(rng, result=value)
    return turn("calculator", user, f"{expression} = {value}", (tool,), [Call(name, {parameter: expression}, result)])


def adder(rng: random.Random) -> Turn:
    name = rng.choice(("add", "add_numbers", "sum", "add", "add_two_numbers"))
    x, y = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")))
    kind = rng.choice(("integer", "integer", "number"))
    tool = function(
        rng, name, rng.choice(("Add two numbers.", "Adds two integers")), {x: {"type": kind}, y: {"type": kind}}
    )
    digits = rng.choice((100, 1000, 10000))
    a, b = rng.randrange(digits), rng.randrange(digits)
    if rng.random() < 0.6:
        user = phrase(rng, rng.choice(INFIX), e=f"{a}{rng.choice((' + ', ' + ', ' plus '))}{b}")
    else:
        template = rng.choice(SUM_WORDS[:4])
        user = phrase(rng, template, a=a, b=b)
        if template.startswith("Add {b}"):
            a, b = b, a
    result = str(a + b) if rng.random() < 0.4 else result_json(rng, **{rng.choice(("result", "sum")): a + b})
    return turn("adder", user, f"{a} + {b} = {a + b}", (tool,), [Call(name, {x: a, y: b}, result)])


def message(rng: random.Random) -> Turn:
    name = rng.choice(("send_message", "send_message", "send_email", "message", "send_text"))
    to = rng.choice(("to", "recipient", "name"))
    body = rng.choice(("text", "message", "body"))
    tool = function(
        rng, name, rng.choice(("Send a message to a person.", "Send a message")), {to: text("Who"), body: text("What")}
    )
    person, said = rng.choice(words.NAMES), " ".join(draw_words(rng, 0.2))
    template = rng.choice((
        'Send {n} the message "{w}".', "Send a message to {n}: {w}", "Tell {n}: {w}", 'Write "{w}" to {n}.',
        "Message {n}: {w}",
        "Please send {n} this: {w}",
    ))  # fmt: skip
    result = rng.choice(
        ("ok", "sent", result_json(rng, status="sent"), result_json(rng, ok=True), result_json(rng, status="ok"))
    )
    answer = f"The message to {person} is sent."
    return turn(
        "message",
        phrase(rng, template, n=person, w=said),
        answer,
        (tool,),
        [Call(name, {to: person, body: said}, result)],
    )


def alarm(rng: random.Random) -> Turn:
    name = rng.choice(("set_alarm", "set_alarm", "create_alarm", "alarm"))
    parameter = rng.choice(("time", "time", "at", "when"))
    tool = function(
        rng, name, rng.choice(("Set an alarm.", "Set the alarm clock")), {parameter: text("The time as HH:MM")}
    )
    at = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    template = rng.choice(
        (
            "Set an alarm for {t}.",
            "Wake me at {t}.",
            "alarm at {t}",
            "Please set the alarm to {t}.",
            "Wake me up at {t}",
        )
    )
    result = rng.choice(("ok", result_json(rng, status="ok"), result_json(rng, ok=True), "done"))
    return turn(
        "alarm",
        phrase(rng, template, t=at),
        f"The alarm is set for {at}.",
        (tool,),
        [Call(name, {parameter: at}, result)],
    )


def stock(rng: random.Random) -> Turn:
    name = rng.choice(("get_stock_price", "stock_price", "get_price", "get_stock_price"))
    parameter = rng.choice(("symbol", "ticker", "symbol"))
    tool = function(
        rng, name, rng.choice(("Get the price of a stock.", "Stock prices")), {parameter: text("The ticker symbol")}
    )
    symbol = "".join(rng.choices("ABCDEFGHIKLMNOPRSTUVWXYZ", k=rng.choice((3, 4, 4))))
    price = rng.randrange(1, 2000)
    template = rng.choice(
        (
            "What is the stock price of {s}?",
            "price of {s}",
            "How much is {s}?",
            "What does {s} cost?",
            "Get the price of {s}.",
        )
    )
    result = str(price) if rng.random() < 0.3 else result_json(rng, price=price)
    return turn(
        "stock",
        phrase(rng, template, s=symbol),
        f"The price of {symbol} is {price}.",
        (tool,),
        [Call(name, {parameter: symbol}, result)],
    )


def search(rng: random.Random) -> Turn:
    name = rng.choice(("search", "web_search", "search", "search_web"))
    parameter = rng.choice(("query", "query", "q", "text"))
    tool = function(
        rng, name, rng.choice(("Search the web.", "Find pages on the web")), {parameter: text("What to search for")}
    )
    query, found = " ".join(draw_words(rng, 0.2)), " ".join(draw_words(rng, 0.1))
    template = rng.choice(
        ("Search for {q}.", "Search the web for {q}.", "Find {q}", "Look up {q}.", "Please search for {q}.")
    )
    result = found if rng.random() < 0.4 else result_json(rng, **{rng.choice(("result", "results", "text")): found})
    return turn(
        "search",
        phrase(rng, template, q=query),
        f"I found this: {found}",
        (tool,),
        [Call(name, {parameter: query}, result)],
    )


def by_name(rng: random.Random) -> Turn:
    """A tool nobody has heard of, called by its name: everything has to be copied."""
    name = "_".join(rng.sample(words.WORDS, 2))
    parameter = rng.choice(words.WORDS)
    numeric = rng.random() < 0.3
    tool = function(
        rng,
        name,
        f"The {name.replace('_', ' ')} function.",
        {parameter: integer("a value") if numeric else text("a value")},
    )
    value: str | int = rng.randrange(1000) if numeric else rng.choice(words.CITIES + words.WORDS)
    template = rng.choice((
        "Call {f} with {p} {v}.", "Use {f} with {p} {v}", "Call {f} with {p} = {v}", "Run {f} for {p} {v}.",
        "Use the tool {f} with {p} {v}.",
    ))  # fmt: skip
    outcome = rng.choice((str(rng.randrange(1000)), " ".join(draw_words(rng, 0.1))))
    result = outcome if rng.random() < 0.4 else result_json(rng, result=outcome)
    user = phrase(rng, template, f=name, p=parameter, v=value)
    return turn("by-name", user, f"The result is: {outcome}", (tool,), [Call(name, {parameter: value}, result)])


def turn(kind: str, user: str, answer: str, tools: tuple[Json, ...], calls: list[Call]) -> Turn:
    """A tool turn; its key is the call itself, so other names for the same request are not the same item."""
    arguments = " ".join(str(value) for call in calls for value in call.arguments.values())
    plan = (
        f"I call {calls[0].name} for {arguments}." if len(calls) == 1 else f"I call {calls[0].name} {len(calls)} times."
    )
    return Turn(
        "tool",
        f"{kind} {user} {answer}",
        user,
        answer,
        "The tool has answered.",
        tools=tools,
        calls=tuple(calls),
        call_thought=plan,
    )


TOOL_MAKERS: dict[ToolMaker, float] = {
    weather: 4, clock: 2, calculator: 2, adder: 2, message: 1.5, alarm: 1, stock: 1.5, search: 1.5, by_name: 2.5,
}  # fmt: skip
# These answer what the other tasks ask as well, so they never stand beside a question that the model answers itself.
COMPETING: frozenset[ToolMaker] = frozenset((calculator, adder, search, stock, by_name))
FAILURES = ("not found", "timeout", "unknown city", "service unavailable", "permission denied", "invalid request")


def failed(rng: random.Random, made: Turn) -> Turn:
    """The same turn when the tool reports an error."""
    error = rng.choice(FAILURES)
    result = f"Error: {error}" if rng.random() < 0.3 else result_json(rng, error=error)
    call = made.calls[0]
    return Turn(
        made.task, made.key, made.user, f"The tool reported an error: {error}", "The tool has failed.",
        tools=made.tools, calls=(Call(call.name, call.arguments, result),), call_thought=made.call_thought,
    )  # fmt: skip


def tool_turn(rng: random.Random) -> Turn:
    """A request for one of one to three tools in any order."""
    makers = list(TOOL_MAKERS)
    chosen = rng.choices(makers, weights=list(TOOL_MAKERS.values()))[0]
    made = chosen(rng)
    if len(made.calls) == 1 and rng.random() < 0.06:
        made = failed(rng, made)
    rivals = {calculator, adder} if chosen in (calculator, adder) else {chosen}
    others = rng.sample([maker for maker in makers if maker not in rivals], rng.choice((0, 0, 0, 1, 1, 2)))
    tools = [*made.tools, *(other(rng).tools[0] for other in others)]
    rng.shuffle(tools)
    return Turn(
        made.task,
        made.key,
        made.user,
        made.answer,
        made.thought,
        tools=tuple(tools),
        calls=made.calls,
        call_thought=made.call_thought,
    )


def idle_tools(rng: random.Random) -> tuple[Json, ...]:
    """One or two tools that the question at hand does not need."""
    makers = [maker for maker in TOOL_MAKERS if maker not in COMPETING]
    return tuple(maker(rng).tools[0] for maker in rng.sample(makers, rng.choice((1, 1, 2))))
