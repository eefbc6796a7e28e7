"""Embeddings, rerank and score over HTTP: the service but Ray, against transformers; the bounds of one body."""

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import QueueFullError
from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.engine.core import EngineCore
from nanoserve.model.build import build
from nanoserve.serving.door import Health, ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.serving.pooling_route import WINDOW
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.embedding_recipe import EmbeddingRecipe
from nanoserve.text.pooling import PoolingOptions, PoolingPreprocessor
from nanoserve.text.preprocess import ModelLimits, Preprocessor
from tests.pooling_checkpoints import Saved, write
from tests.serving.local_door import LocalDoor
from tests.serving.loopback import listening
from tests.serving.replies import refused, strict_json
from tests.serving.scripted_door import ScriptedStream

EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
MODEL = "team/pool"
DOCUMENTS = ["hello world", "the quick brown fox", "naïve café", "", "say it", "the lazy dog jumps over"]
NO_OPTIONS = PoolingOptions()


def served_model(saved: Saved, tasks: tuple[str, ...], max_tokens: int) -> ServedModel:
    limits = ModelLimits(max_model_len=max_tokens, vocab_size=512, max_kv_tokens=max_tokens)
    defaults = GenerationDefaults.load(saved.folder, saved.tokenizer.eos_token_id)
    return ServedModel(
        name=MODEL,
        created=1,
        limits=limits,
        tokenizer=saved.tokenizer,
        preprocessor=Preprocessor(saved.tokenizer, limits, defaults, generates="generate" in tasks),
        pooling=PoolingPreprocessor(
            saved.tokenizer, limits, tasks=tasks, vector_size=64, recipe=EmbeddingRecipe.load(saved.folder)
        ),
    )


@dataclass
class Service:
    saved: Saved
    door: LocalDoor
    served: ServedModel
    client: httpx.AsyncClient

    async def post(self, path: str, **fields: Any) -> Any:
        response = await self.client.post(path, json={"model": MODEL} | fields)
        assert response.status_code == 200, response.text
        return strict_json(response.content)

    async def refused(self, path: str, param: str | None, **fields: Any) -> str:
        error = refused(await self.client.post(path, json={"model": MODEL} | fields), 400, param)
        return str(error["message"])

    def judged(self, query: str, documents: list[str]) -> list[float]:
        """What transformers says of the pairs that this door makes (``tests/text`` holds these against Qwen's)."""
        assert self.served.pooling is not None
        batch = self.served.pooling.pairs([query], documents, "x", NO_OPTIONS)
        return [self.saved.judge(batch.request(index).prompt_token_ids) for index in range(len(documents))]

    def embedded(self, text: str, dimensions: int | None = None) -> list[float]:
        return self.saved.embed(self.saved.tokenizer.encode(text, allow_special=True), dimensions)


Serve = Callable[..., AbstractAsyncContextManager[Service]]


@pytest.fixture(scope="module", autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return write(tmp_path_factory.mktemp("causal"), "causal", seed=5)


@asynccontextmanager
async def serve(saved: Saved, **overrides: Any) -> AsyncIterator[Service]:
    """The service; in the end nothing runs and every block is free."""
    settings: dict[str, Any] = {"kv_cache_memory": "1MiB", "max_model_len": 512}
    loaded = build(EngineArgs(model=str(saved.folder), **(settings | overrides)))
    served = served_model(saved, loaded.info.tasks, loaded.scheduler.max_model_len)
    door = LocalDoor(EngineCore(loaded.runner, loaded.scheduler), [served])
    door.engine.start()
    transport = httpx.ASGITransport(build_app(door, HttpConfig()), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield Service(saved, door, served, client)
            async with asyncio.timeout(5):
                while door.stats.num_running or door.stats.num_free_blocks != door.stats.num_blocks:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    finally:
        door.engine.stop()


async def test_embeddings_equal_transformers_in_both_encodings(causal: Saved) -> None:
    async with serve(causal) as service:
        reply = await service.post(EMBEDDINGS, input=DOCUMENTS[:3])
        assert (reply["object"], reply["model"]) == ("list", MODEL)
        assert [(item["object"], item["index"]) for item in reply["data"]] == [("embedding", i) for i in range(3)]
        for item, text in zip(reply["data"], DOCUMENTS, strict=False):
            assert item["embedding"] == pytest.approx(service.embedded(text), abs=2e-5)
        num_tokens = sum(len(causal.tokenizer.encode(text, allow_special=True)) for text in DOCUMENTS[:3])
        assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        packed = await service.post(EMBEDDINGS, input=DOCUMENTS[:3], encoding_format="base64")
        for item, other in zip(packed["data"], reply["data"], strict=True):
            numbers = struct.unpack("<64f", base64.b64decode(item["embedding"]))
            assert numbers == pytest.approx(other["embedding"], abs=1e-6)
        short = await service.post(EMBEDDINGS, input=DOCUMENTS[0], dimensions=5)
        assert short["data"][0]["embedding"] == pytest.approx(service.embedded(DOCUMENTS[0], 5), abs=2e-5)
        ids = causal.tokenizer.encode(DOCUMENTS[0], allow_special=True)
        by_ids = await service.post(EMBEDDINGS, input=[ids])
        assert by_ids["data"][0]["embedding"] == pytest.approx(reply["data"][0]["embedding"], abs=1e-6)


async def test_rerank_and_score_equal_transformers(causal: Saved) -> None:
    query = "quick words"
    async with serve(causal, max_num_batched_tokens=50) as service:
        expected = service.judged(query, DOCUMENTS)
        scored = await service.post(SCORE, text_1=query, text_2=DOCUMENTS)
        assert [item["score"] for item in scored["data"]] == pytest.approx(expected, abs=1e-4)
        assert [(item["object"], item["index"]) for item in scored["data"]] == [("score", i) for i in range(6)]
        order = sorted(range(6), key=lambda index: -expected[index])
        for path in (RERANK, "/rerank", "/v2/rerank"):
            reply = await service.post(path, query=query, documents=DOCUMENTS)
            assert [result["index"] for result in reply["results"]] == order
            assert [r["relevance_score"] for r in reply["results"]] == pytest.approx(sorted(expected)[::-1], abs=1e-4)
            assert reply["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
        assert reply["usage"] == scored["usage"]
        best = await service.post(RERANK, query=query, documents=DOCUMENTS, top_n=2, return_documents=False)
        assert [set(result) for result in best["results"]] == [{"index", "relevance_score"}] * 2
        assert [result["index"] for result in best["results"]] == order[:2]
        assert len((await service.post(RERANK, query=query, documents=DOCUMENTS, top_n=99))["results"]) == 6
        pairs = await service.post("/score", text_1=[query, "x"], text_2=DOCUMENTS[:2])
        assert pairs["data"][0]["score"] == pytest.approx(expected[0], abs=1e-4)
        assert pairs["data"][1]["score"] == pytest.approx(service.judged("x", DOCUMENTS[1:2])[0], abs=1e-4)
        answer = await service.client.post(RERANK, json={"query": query, "documents": DOCUMENTS})
        assert answer.status_code == 200, "with one model served, its name may be left out"


async def test_vectors_beside_running_answers(causal: Saved) -> None:
    async with serve(causal, max_num_seqs=4, max_num_batched_tokens=16) as service:
        plain = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        alone = await service.post("/v1/completions", **plain)
        answers = [service.post("/v1/completions", **plain) for _ in range(3)]
        *texts, reply = await asyncio.gather(*answers, service.post(EMBEDDINGS, input=DOCUMENTS[:3] * 10))
        assert [text["choices"][0]["text"] for text in texts] == [alone["choices"][0]["text"]] * 3
        for index, item in enumerate(reply["data"]):
            assert item["embedding"] == pytest.approx(service.embedded(DOCUMENTS[index % 3]), abs=2e-5)


async def test_the_openai_client_reads_both_encodings(causal: Saved) -> None:
    async with (
        serve(causal) as service,
        listening(build_app(service.door, HttpConfig())) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0) as client,
    ):
        usual = await client.embeddings.create(model=MODEL, input=["hello world", "say it"])  # asks for base64 itself
        floats = await client.embeddings.create(model=MODEL, input="hello world", encoding_format="float", dimensions=9)
        assert usual.data[0].embedding == pytest.approx(service.embedded("hello world"), abs=2e-5)
        assert usual.data[1].index == 1
        assert floats.data[0].embedding == pytest.approx(service.embedded("hello world", 9), abs=2e-5)
        assert usual.usage.total_tokens > usual.usage.prompt_tokens - 1 > 0
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model=MODEL, input="a", dimensions=65)
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="a")


async def test_bad_bodies_are_one_sentence(causal: Saved) -> None:
    async with serve(causal, max_model_len=64) as service:
        assert "64" in await service.refused(EMBEDDINGS, "input", input="7" * 100)
        assert "empty" in await service.refused(EMBEDDINGS, "input", input="")
        await service.refused(EMBEDDINGS, "input")
        await service.refused(EMBEDDINGS, "input", input=None)
        await service.refused(EMBEDDINGS, "input", input=[["a"]])
        await service.refused(EMBEDDINGS, "encoding_format", input="a", encoding_format="uint8")
        await service.refused(EMBEDDINGS, "dimensions", input="a", dimensions=True)
        await service.refused(RERANK, "documents", query="a", documents="b")
        await service.refused(RERANK, "documents", query="a", documents=[["b"]])
        await service.refused(RERANK, "query", documents=["b"])
        await service.refused(SCORE, "text_1", text_2="b")
        cut = await service.post(EMBEDDINGS, input="7" * 100, truncate_prompt_tokens=-1)
        assert cut["usage"]["prompt_tokens"] == 64


@pytest.mark.parametrize("form", ["published", "classifier"])
async def test_a_model_that_cannot_says_what_it_can(tmp_path: Path, form: str) -> None:
    saved = write(tmp_path, form, seed=6)
    async with serve(saved) as service:
        for path, fields in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": [_HI]})):
            assert "writes no text" in await service.refused(f"/v1/{path}", "model", **fields)
        if form == "published":
            assert "embed" in await service.refused(SCORE, "model", text_1="a", text_2="b")
            reply = await service.post(EMBEDDINGS, input="hello world")
            assert reply["data"][0]["embedding"] == pytest.approx(service.embedded("hello world"), abs=2e-5)
        else:
            assert "score" in await service.refused(EMBEDDINGS, "model", input="a")
            reply = await service.post(SCORE, text_1="quick", text_2=DOCUMENTS)
            assert [i["score"] for i in reply["data"]] == pytest.approx(service.judged("quick", DOCUMENTS), abs=1e-4)


_HI = {"role": "user", "content": "hi"}


@dataclass
class CountingDoor:
    """Pools nothing but counts: how many are open at once, and when to refuse or fail."""

    served: list[ServedModel]
    num_full_after: int = 10**9
    fails_at: int = 10**9
    num_opened: int = 0
    num_open: int = 0
    most_open: int = 0
    num_refused: int = 0
    streams: list[ScriptedStream] = field(default_factory=list)

    async def open(self, request: GenerateRequest, model: str) -> Any:
        await asyncio.sleep(0)
        if self.num_opened >= self.num_full_after:
            self.num_refused += 1
            self.num_full_after = 10**9 if self.num_refused > 3 else self.num_full_after
            raise QueueFullError("Full.", retry_after_s=0.001)
        self.num_opened += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        index = int(request.request_id.rpartition("-")[2])
        news = RequestOutput(request.request_id, (), FinishReason.LENGTH, pooled=struct.pack("<2f", index, 0.0))
        if index == self.fails_at:
            news = RequestOutput(request.request_id, (), FinishReason.ERROR, error=("server_error", "It broke."))
        return _Counted(self, news)

    def models(self) -> list[ServedModel]:
        return self.served

    async def health(self) -> Health:
        return Health(healthy=True, ready=True)

    async def metrics(self) -> bytes:
        return b""


class _Counted:
    def __init__(self, door: CountingDoor, news: RequestOutput) -> None:
        self._door, self._news = door, news

    async def next(self) -> RequestOutput:
        await asyncio.sleep(0)
        return self._news

    def close(self) -> None:
        self._door.num_open -= 1


@asynccontextmanager
async def client_of(door: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(door, HttpConfig()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def served(causal: Saved) -> ServedModel:
    return served_model(causal, ("generate", "embed", "score"), 512)


async def test_2048_inputs_are_a_window_at_a_time(served: ServedModel) -> None:
    door = CountingDoor([served])
    async with client_of(door) as client:
        reply = (await client.post(EMBEDDINGS, json={"model": MODEL, "input": ["a"] * 2048})).json()
    assert [item["embedding"] for item in reply["data"]] == [[index, 0.0] for index in range(2048)]
    assert (door.num_opened, door.most_open, door.num_open) == (2048, WINDOW, 0)


async def test_a_full_queue_refuses_a_fresh_body_but_not_the_rest_of_one(served: ServedModel) -> None:
    fresh, begun = CountingDoor([served], num_full_after=0), CountingDoor([served], num_full_after=WINDOW + 5)
    body = {"model": MODEL, "input": ["a"] * 300}
    async with client_of(fresh) as client:
        answer = await client.post(EMBEDDINGS, json=body)
        refused(answer, 429)
        assert answer.headers["retry-after"]
    async with client_of(begun) as client:
        assert (await client.post(EMBEDDINGS, json=body)).status_code == 200
    assert (begun.num_refused, begun.num_opened, begun.num_open) == (4, 300, 0)


async def test_one_failure_ends_them_all_and_leaves_nothing_open(served: ServedModel) -> None:
    door = CountingDoor([served], fails_at=200)
    async with client_of(door) as client:
        answer = await client.post(EMBEDDINGS, json={"model": MODEL, "input": ["a"] * 2048})
    assert refused(answer, 500)["message"] == "It broke."
    assert door.num_open == 0
    assert door.num_opened < 2048
