"""Two hundred varied schemas, sampled at temperature 1 from a model of noise: what is finished validates."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from tests.cases.conftest import Serve
from tests.cases.rig import Rig

NUM_SCHEMAS = 200
NAMES = ("a", "name", "größe", "日本", 'quo"te', "back\\slash", "with space", "é🧵")
Schema = dict[str, Any]


def text(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "maxLength": rng.randint(0, 4)}


def pattern(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(("^[a-c]{2,4}$", "^x[0-9]+y$", "^(ab|cd){1,2}$", "^[A-Z]é?$"))}


def formatted(rng: random.Random, depth: int) -> Schema:
    """No dates: a grammar knows no calendar, and JSON Schema takes a leap second for one that jsonschema does not."""
    return {"type": "string", "format": rng.choice(("ipv4", "ipv6", "uuid", "email"))}


def integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice((1, 2.5, 1000))}


def simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(("boolean", "null"))}


def enumerated(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(["red", "grün", 1, 2.5, None, True, ["x"], {"k": 1}], rng.randint(1, 5))}


def constant(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(("yes", 7, None, [1, 2], {"a": {"b": "ü"}}))}


def array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "array", "items": schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def tuple_(rng: random.Random, depth: int) -> Schema:
    first = [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def object_(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def mapping(rng: random.Random, depth: int) -> Schema:
    return {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": rng.randint(0, 2)}


def any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def listed(rng: random.Random, depth: int) -> Schema:
    return {"$ref": rng.choice(("#/$defs/list", "#/$defs/tree", "#/$defs/word"))}


LEAVES: tuple[Callable[[random.Random, int], Schema], ...] = (
    text, pattern, formatted, integer, number, simple, enumerated, constant, listed,
)  # fmt: skip
NESTS = (array, tuple_, object_, object_, object_, any_of, mapping)
DEFINITIONS = {
    "word": {"type": "string", "pattern": "^[a-z]{1,3}$"},
    "list": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/cell"}]},
    "cell": {
        "type": "object",
        "properties": {"head": {"type": "boolean"}, "tail": {"$ref": "#/$defs/list"}},
        "required": ["head", "tail"],
        "additionalProperties": False,
    },
    "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
}


def schema(rng: random.Random, depth: int) -> Schema:
    return rng.choice(NESTS if depth > 0 and rng.random() < 0.6 else LEAVES)(rng, depth)


def whole(seed: int) -> Schema:
    rng = random.Random(seed)
    return object_(rng, 3) | {"$defs": DEFINITIONS}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_what_is_finished_validates(rig: Rig, serve: Serve) -> None:
    finished = 0

    async def check(seed: int) -> None:
        nonlocal finished
        wanted = whole(seed)
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": wanted, "strict": True}}
        reply = await service.chat(response_format=form, temperature=1.0, seed=seed, max_tokens=300)
        (choice,) = reply["choices"]
        if choice["finish_reason"] == "stop":
            finished += 1
            jsonschema.validate(
                json.loads(choice["message"]["content"]), wanted, format_checker=jsonschema.FormatChecker()
            )
        else:
            assert choice["finish_reason"] == "length"

    async with serve(rig.sens(), max_num_seqs=16, kv_cache_memory="64MiB") as service:
        for start in range(0, NUM_SCHEMAS, 8):
            await asyncio.gather(*(check(seed) for seed in range(start, min(start + 8, NUM_SCHEMAS))))
    assert finished > NUM_SCHEMAS * 0.7


async def test_a_few_schemas(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens(), max_num_seqs=16) as service:
        for seed in range(1000, 1006):
            wanted = whole(seed)
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": wanted}}
            reply = await service.chat(response_format=form, temperature=1.0, seed=seed, max_tokens=700)
            if reply["choices"][0]["finish_reason"] == "stop":
                jsonschema.validate(json.loads(reply["choices"][0]["message"]["content"]), wanted)
