"""The OpenAPI document says what is served."""

import re

import jsonschema
import pytest

from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.serving.openapi import BODIES
from tests.serving.conftest import ClientFor
from tests.serving.scripted_door import ScriptedDoor
from tests.serving.test_http_fuzz import SEEDS


async def test_every_route_is_in_it_and_nothing_else(served: ServedModel, client_for: ClientFor) -> None:
    door = ScriptedDoor([served])
    async with client_for(door) as client:
        document = (await client.get("/openapi.json")).json()
    told = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    routes = build_app(door, HttpConfig()).routes
    assert told == {
        (method, re.sub(r"\{(\w+):path\}", r"{\1}", route.path))  # type: ignore[attr-defined]
        for route in routes
        for method in route.methods  # type: ignore[attr-defined]
    }
    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(set(names)) == len(told)


async def test_the_bodies_of_the_tests_match_their_schemas(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([served])) as client:
        document = (await client.get("/openapi.json")).json()
    assert BODIES.keys() >= SEEDS.keys()
    for path, body in SEEDS.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"] | {"components": document["components"]}
        jsonschema.validate(body, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"model": 7}, schema)
