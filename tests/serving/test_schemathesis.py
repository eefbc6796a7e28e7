"""At least two thousand requests made from `/openapi.json`, valid and not: every answer is a documented one."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from tests.serving.replies import refused
from tests.serving.scripted_door import ScriptedDoor

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
pytestmark = pytest.mark.slow

NUM_REQUESTS = 2000


class Probe:
    """Sends generated cases to an app over a scripted door, and judges the answers."""

    def __init__(self, served: ServedModel) -> None:
        self.door = ScriptedDoor([served], token_ids=[65, 66], stop_token_id=served.tokenizer.eos_token_id)
        transport = httpx.ASGITransport(build_app(self.door, HttpConfig()), raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://test")
        self._runner = asyncio.Runner()
        self._model = served.name
        self.num_requests = 0
        self.statuses: set[int] = set()

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self._runner.run(self._client.request("GET", path, **arguments))

    def send(self, case: Any) -> None:
        body = case.body
        if isinstance(body, dict) and "model" in body and self.num_requests % 4:
            body = body | {"model": self._model}  # else nearly all would stop at an unknown model
        content = None if not isinstance(body, dict | list | str | int | float | bool | None) else json.dumps(body)
        arguments: dict[str, Any] = {"content": content} if case.method == "POST" else {}
        response = self._runner.run(self._client.request(case.method, case.formatted_path, timeout=20, **arguments))
        self.num_requests += 1
        self.statuses.add(response.status_code)
        documented = case.operation.definition.raw["responses"]
        assert str(response.status_code) in documented, response.text
        assert response.status_code < 500, response.text
        media = response.headers["content-type"].split(";")[0]
        assert media in documented[str(response.status_code)]["content"], media
        if response.status_code >= 400:
            refused(response, response.status_code)

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


@pytest.fixture
def probe(served: ServedModel) -> Iterator[Probe]:
    probe = Probe(served)
    yield probe
    probe.close()


@pytest.mark.timeout(1200)
def test_every_answer_is_documented(probe: Probe) -> None:
    schema = schemathesis.openapi.from_dict(probe.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    modes = list(schemathesis.GenerationMode)
    num_each = -(-NUM_REQUESTS // (len(modes) * sum(operation.method == "post" for operation in operations)))
    for operation in operations:
        for mode in modes if operation.method == "post" else modes[:1]:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=num_each, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            def send(case: Any) -> None:
                probe.send(case)

            send()
    assert probe.num_requests >= NUM_REQUESTS * 0.95
    assert 200 in probe.statuses
    assert all(stream.closed for stream in probe.door.streams)
    assert probe.get("/health").status_code == 200
