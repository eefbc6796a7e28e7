"""Keys, CORS, request ids, paths: what holds for every route, found from the app itself so that no route slips by."""

import re

import httpx
import pytest

from nanoserve.serving.callers import OPEN_PATHS
from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from tests.serving.conftest import ClientFor
from tests.serving.replies import refused
from tests.serving.scripted_door import ScriptedDoor

KEYED = HttpConfig(api_keys=("k-first", "k-second"))
BEARER = {"authorization": "Bearer k-second"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def all_routes(door: ScriptedDoor) -> list[tuple[str, str]]:
    """(method, concrete path) of every route of the app."""
    routes = build_app(door, HttpConfig()).routes
    found = []
    for route in routes:
        path = re.sub(r"\{[^}]*\}", "some/thing", route.path)  # type: ignore[attr-defined]
        found += [(method, path) for method in route.methods]  # type: ignore[attr-defined]
    return found


async def test_every_route_asks_for_a_key(served: ServedModel, client_for: ClientFor) -> None:
    door = ScriptedDoor([served])
    routes = all_routes(door)
    assert len(routes) > 8
    async with client_for(door, KEYED) as client:
        for method, path in routes:
            response = await client.request(method, path, json=CHAT if method == "POST" else None)
            if path in OPEN_PATHS:
                assert response.status_code == 200, path
            elif method != "HEAD":
                assert refused(response, 401)["code"] == "invalid_api_key"
    assert not door.opened


@pytest.mark.parametrize(
    "value",
    ["", "k-second", "Bearer", "Bearer wrong", "Bearer k-first k-second", "Basic k-first", "Bearer k-secon\xe9"],
)
async def test_a_wrong_key_is_refused(served: ServedModel, client_for: ClientFor, value: str) -> None:
    async with client_for(ScriptedDoor([served]), KEYED) as client:
        response = await client.get("/v1/models", headers={b"authorization": value.encode("latin-1")})
    assert refused(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("value", ["Bearer k-first", "bearer k-second", "Bearer  k-first "])
async def test_each_key_opens(served: ServedModel, client_for: ClientFor, value: str) -> None:
    async with client_for(ScriptedDoor([served]), KEYED) as client:
        assert (await client.get("/v1/models", headers={"authorization": value})).status_code == 200


async def test_an_unknown_path_and_a_doubled_slash_do_not_go_round_the_key(
    served: ServedModel, client_for: ClientFor
) -> None:
    async with client_for(ScriptedDoor([served]), KEYED) as client:
        for path in ("/v1/unknown", "//v1/models", "/health/../v1/models", "/metrics/x"):
            refused(await client.get(path), 401)


PREFLIGHT = {
    "origin": "https://ui.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_cors_is_off_by_default(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([served]), KEYED) as client:
        response = await client.options("/v1/chat/completions", headers=PREFLIGHT)
    refused(response, 405)
    assert "access-control-allow-origin" not in response.headers


async def test_a_preflight_needs_no_key_and_errors_are_readable_by_the_page(
    served: ServedModel, client_for: ClientFor
) -> None:
    config = HttpConfig(api_keys=("k",), cors_origins=("https://ui.example",))
    async with client_for(ScriptedDoor([served]), config) as client:
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refusal = await client.get("/v1/models", headers={"origin": "https://ui.example"})
        assert refused(refusal, 401)
        assert refusal.headers["access-control-allow-origin"] == "https://ui.example"
        refused(await client.options("/v1/models", headers=PREFLIGHT | {"origin": "https://other.example"}))


async def test_a_request_id_is_taken_or_made_on_every_reply(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([served], token_ids=[65])) as client:
        assert (await client.get("/health", headers={"x-request-id": "mine-1"})).headers["x-request-id"] == "mine-1"
        missing = await client.get("/nowhere", headers={"x-request-id": "mine-2"})
        assert missing.headers["x-request-id"] == "mine-2"
        made = {(await client.get("/health")).headers["x-request-id"] for _ in range(3)}
        assert len(made) == 3
        for bad in (b"x" * 20_000, b"two words", b"caf\xe9", b""):
            reply = await client.get("/health", headers={b"x-request-id": bad})
            assert re.fullmatch(r"req-[0-9a-f]{32}", reply.headers["x-request-id"])


async def test_two_requests_of_one_id_have_ids_of_their_own(served: ServedModel, client_for: ClientFor) -> None:
    door = ScriptedDoor([served], token_ids=[65])
    body = CHAT | {"model": served.name}
    async with client_for(door) as client:
        replies = [
            await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "same"}) for _ in range(2)
        ]
    assert {reply.headers["x-request-id"] for reply in replies} == {"same"}
    assert len({reply.json()["id"] for reply in replies}) == 2
    assert len({request.request_id for request in door.opened}) == 2


async def model_of(client: httpx.AsyncClient, path: str) -> httpx.Response:
    return await client.get(path, headers=BEARER)


async def test_models_are_listed_and_a_name_with_a_slash_resolves(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([served]), KEYED) as client:
        listed = (await model_of(client, "/v1/models")).json()
        assert listed["object"] == "list"
        card = listed["data"][0]
        assert card["id"] == "team/qwen-like"
        assert (card["object"], card["created"], card["max_model_len"]) == ("model", 1, 256)
        for path in ("/v1/models/team/qwen-like", "/v1/models/team%2Fqwen-like", "/v1/models/team/qwen-like/"):
            assert (await model_of(client, path)).json() == card
        assert refused(await model_of(client, "/v1/models/no/such"), 404)["code"] == "model_not_found"


async def test_a_trailing_slash_changes_nothing(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([served], token_ids=[65])) as client:
        for path in ("/v1/models/", "/health/", "/ready//"):
            assert (await client.get(path)).status_code == 200
        reply = await client.post("/v1/chat/completions/", json=CHAT | {"model": served.name})
        assert reply.status_code == 200


async def test_wrong_paths_and_methods_are_told_in_the_envelope(served: ServedModel, client_for: ClientFor) -> None:
    async with client_for(ScriptedDoor([served])) as client:
        assert refused(await client.post("/v1/unknown", json={}), 404)["code"] == "route_not_found"
        wrong = await client.put("/v1/chat/completions", json={})
        assert refused(wrong, 405)["code"] == "method_not_allowed"
        assert wrong.headers["allow"] == "POST"
        assert (await client.head("/health")).status_code == 200
