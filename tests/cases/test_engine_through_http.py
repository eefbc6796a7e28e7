"""The engine's promises, seen through the wire: cache, batch, preemption and leaving clients change nothing."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError
from nanoserve.model.build import build
from nanoserve.model.runner import ModelRunner
from nanoserve.serving.http import HttpConfig, build_app
from tests.cases.conftest import Serve
from tests.cases.rig import Rig
from tests.cases.service import CHAT, SAY_IT, TEXT, content, finish, num_completion_tokens
from tests.serving.loopback import RawClient, listening
from tests.serving.replies import joined_text

BLOCK = 16
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def token_ids(reply: dict[str, Any]) -> list[int]:
    ids: list[int] = reply["choices"][0]["token_ids"]
    return ids


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(0, 400, (length,), generator=generator)]


def reference(folder: Path, prompt: list[int], num_tokens: int) -> list[int] | None:
    """transformers' greedy continuation; None where two tokens are nearly alike and rounding may choose."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < 0.01:
            return None
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
async def test_a_cached_prompt_gives_the_uncached_answer(rig: Rig, serve: Serve, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    async with serve(rig.sens(), enable_prefix_caching=False) as service:
        right = token_ids(await service.text(prompt, max_tokens=16, **GREEDY))
    for chunk in (8, 64):
        async with serve(rig.sens(), max_num_batched_tokens=chunk) as service:
            cold = await asyncio.gather(*[service.text(prompt, max_tokens=16, **GREEDY) for _ in range(8)])
            warm = [await service.text(prompt, max_tokens=16, **GREEDY) for _ in range(3)]
            assert [token_ids(reply) for reply in [*cold, *warm]] == [right] * 11
            cached = warm[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    "args", [{}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": False}]
)
async def test_batch_mates_and_order_change_nothing(rig: Rig, serve: Serve, args: dict[str, Any]) -> None:
    folder, shared = rig.sens(), prompt_of(40, seed=99)
    prompts = [prompt_of(length, seed=length) for length in (1, 3, 17, 33, 64, 90)]
    prompts += [shared + prompt_of(length, seed=length) for length in (2, 9, 30)]
    pairs = [(prompt, right) for prompt in prompts if (right := reference(folder, prompt, 12)) is not None]
    assert len(pairs) > 4
    async with serve(folder, **args) as service:
        for order in (pairs, pairs[::-1]):
            replies = await asyncio.gather(*[service.text(p, max_tokens=12, logprobs=1, **GREEDY) for p, _ in order])
            assert [token_ids(reply) for reply in replies] == [right for _, right in order]


async def test_preempted_requests_lose_and_repeat_nothing(rig: Rig, serve: Serve) -> None:
    folder = rig.sens()
    prompts = [prompt_of(length, seed=length) for length in range(10, 58, 4)]
    fields = GREEDY | {"max_tokens": 60}
    async with serve(folder) as service:
        right = [token_ids(await service.text(prompt, **fields)) for prompt in prompts]
    for args in ({}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 24}):
        async with serve(folder, kv_cache_memory=12 * BLOCK * 1024, **args) as service:
            streams = await asyncio.gather(*[service.stream(TEXT, prompt=prompt, **fields) for prompt in prompts])
            found = [[i for chunk in s[:-1] for i in chunk["choices"][0].get("token_ids", [])] for s in streams]
            assert found == right
            assert [joined_text(stream)[0]["finish_reason"] for stream in streams] == ["length"] * len(prompts)
            assert service.door.stats.num_preemptions_total > 0


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_blocks(rig: Rig, serve: Serve, stream: bool, reset: bool) -> None:
    """vllm#54947: the engine went on to max_tokens for nobody."""
    body = {"model": "team/case", "messages": SAY_IT, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    async with serve(rig.sens()) as service, listening(build_app(service.door, HttpConfig())) as port:
        for _ in range(4):
            client = await RawClient.connect(port)
            await client.post(CHAT, json.dumps(body).encode())
            if stream:
                await client.reader.readuntil(b'"content":"')
            async with asyncio.timeout(5):
                while not service.door.stats.num_running:  # noqa: ASYNC110 (the engine's thread sets it)
                    await asyncio.sleep(0.005)
            await client.leave(reset=reset)
            await service.drained()
        assert service.door.stats.num_aborted_total == 4
        assert service.door.stats.num_generated_tokens_total < 4 * 1900


async def test_equal_request_ids_do_not_meet(rig: Rig, serve: Serve) -> None:
    async def ask(service: Any, word: str, request_id: str, **fields: Any) -> Any:
        body = service.body(CHAT, {"messages": [{"role": "user", "content": word}], "temperature": 0} | fields)
        return await service.client.post(CHAT, json=body, headers={"x-request-id": request_id})

    async with serve(rig.sens()) as service:
        alone = [(await ask(service, word, "", max_tokens=40)).json() for word in ("first", "second")]
        both = await asyncio.gather(*[ask(service, word, "same-1", max_tokens=40) for word in ("first", "second")])
        assert [content(reply.json()) for reply in both] == [content(reply) for reply in alone]
        assert len({reply.json()["id"] for reply in both}) == 2
        long = await ask(service, "third", "x" * 20_000, max_tokens=4)
        assert len(long.headers["x-request-id"]) < 129
        assert len(long.content) < 2000


async def test_a_request_in_flight_is_not_changed_by_bad_ones(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens()) as service:
        fields = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
        alone = content(await service.chat(**fields))
        running = asyncio.create_task(service.chat(**fields))
        for bad in ({"logit_bias": {str(rig.vocab_size): 5}}, {"temperature": -1}, {"max_tokens": 0}, {"stop": ""}):
            await service.refuses(**bad)
        assert content(await running) == alone


async def test_a_full_queue_is_429_and_the_others_finish(rig: Rig, serve: Serve) -> None:
    async with serve(rig.sens(), max_num_seqs=1, max_queued_requests=2) as service:
        fields = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
        responses = await asyncio.gather(*[service.post(CHAT, **fields) for _ in range(12)])
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 429}
        full = next(response for response in responses if response.status_code == 429)
        assert re.fullmatch(r"[1-9]\d*", full.headers["retry-after"])
        assert full.json()["error"]["code"] == "queue_full"
        assert len({response.content.split(b'"choices"')[1] for response in responses if response.is_success}) >= 1


async def test_a_dead_engine_is_told_and_health_says_so(
    rig: Rig, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead: list[bool] = []

    def fail(self: ModelRunner, plan: Any) -> Any:
        dead.append(True)
        raise RuntimeError("boom in /somewhere/secret.py")

    async with serve(rig.sens(), survives=False) as service:
        monkeypatch.setattr(ModelRunner, "execute", fail)
        response = await service.post(CHAT, max_tokens=2)
        assert dead
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert (await service.client.get("/health")).status_code == 503
        assert (await service.post(CHAT, max_tokens=2)).status_code >= 500


def test_settings_that_cannot_be_met_are_refused_before_loading(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        build(EngineArgs(model=str(rig.sens()), tensor_parallel_size=3))


async def test_every_token_of_a_long_answer_arrives_once(rig: Rig, serve: Serve) -> None:
    folder, ids = rig.script(" one two three four", loop=True)
    async with serve(folder) as service:
        reply = await service.same(temperature=0, max_tokens=500)
        assert (num_completion_tokens(reply), finish(reply)) == (500, "length")
        assert content(reply) == rig.tokenizer.decode((ids * 500)[:500])
