"""The `openai` client itself, on a real socket: what it parses, joins and raises."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.outputs import FinishReason
from nanoserve.serving.door import Door, ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from tests.cases.conftest import Serve, served_model
from tests.cases.rig import Rig
from tests.cases.service import NO_THINKING, SAY_IT
from tests.cases.test_conversations import ARGUMENTS, CALL_TEXT, ROUTE
from tests.serving.loopback import listening
from tests.serving.scripted_door import ScriptedDoor


@asynccontextmanager
async def client_on(door: Door, config: HttpConfig | None = None) -> AsyncIterator[Any]:
    async with (
        listening(build_app(door, config or HttpConfig())) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


async def read_unfinished(stream: Any) -> None:
    async for chunk in stream:
        assert chunk.choices[0].finish_reason is None


def error_of(raised: pytest.ExceptionInfo[openai.APIStatusError]) -> dict[str, Any]:
    assert isinstance(raised.value.body, dict)
    return raised.value.body


@pytest.fixture
def served(rig: Rig) -> ServedModel:
    counts = SchedulerConfig(num_blocks=64, max_model_len=512)
    return served_model(rig.tokenizer_folder, counts, rig.vocab_size, reasoning=True)


async def test_plain_and_streamed_words(rig: Rig, serve: Serve) -> None:
    folder, _ = rig.script("<think>\nweigh both options\n</think>\n\nPick the second one.", split=1)
    async with serve(folder) as service, client_on(service.door) as client:
        fields: dict[str, Any] = {"model": "team/case", "messages": SAY_IT, "temperature": 0}
        plain = await client.chat.completions.create(**fields)
        assert plain.choices[0].message.content.strip() == "Pick the second one."
        assert plain.choices[0].message.reasoning_content.strip() == "weigh both options"
        stream = await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        words = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert words == plain.choices[0].message.content
        assert chunks[-1].usage.total_tokens == plain.usage.total_tokens
        text = await client.completions.create(model="team/case", prompt="go\n", temperature=0, max_tokens=99)
        assert text.choices[0].text.endswith("Pick the second one.")
        assert [model.id async for model in await client.models.list()] == ["team/case"]
        assert (await client.models.retrieve("team/case")).id == "team/case"


async def test_a_streamed_call_joins_in_the_clients_own_accumulator(rig: Rig, serve: Serve) -> None:
    folder, _ = rig.script(CALL_TEXT, thinking=False, split=2)
    async with serve(folder) as service, client_on(service.door) as client:
        fields: dict[str, Any] = {"model": "team/case", "messages": SAY_IT, "temperature": 0, "tools": [ROUTE]}
        async with client.chat.completions.stream(**fields, extra_body=NO_THINKING) as stream:
            final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert call.function.name == "find_route"
    assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
    assert final.choices[0].finish_reason == "tool_calls"


async def test_mistakes_raise_the_clients_own_errors(served: ServedModel) -> None:
    async with client_on(ScriptedDoor([served])) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="no-such-model", messages=SAY_IT)
        assert error_of(missing)["code"] == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=served.name, messages=SAY_IT, temperature=9)
        assert error_of(bad)["param"] == "temperature"
        assert bad.value.request_id
    async with client_on(ScriptedDoor([served], refusal=RuntimeError("a bug"))) as client:
        with pytest.raises(openai.InternalServerError) as fault:
            await client.chat.completions.create(model=served.name, messages=SAY_IT)
        assert error_of(fault)["type"] == "server_error"
    async with client_on(ScriptedDoor([served]), HttpConfig(api_keys=("other",))) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_fault_in_mid_stream_raises(served: ServedModel) -> None:
    door = ScriptedDoor([served], token_ids=[65, 66], finish=FinishReason.ERROR, error=("server_error", "It broke."))
    async with client_on(door) as client:
        stream = await client.chat.completions.create(model=served.name, messages=SAY_IT, stream=True)
        with pytest.raises(openai.APIError, match="It broke"):
            await read_unfinished(stream)
