"""A model without weights, and a client for an app over a scripted door."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from nanoserve.serving.door import Door, ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.preprocess import ModelLimits, Preprocessor
from nanoserve.text.tokenizer import Tokenizer
from tests.text.small_tokenizer import write_tokenizer

ClientFor = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = write_tokenizer(tmp_path_factory.mktemp("words"))
    tokenizer = Tokenizer.load(folder)
    limits = ModelLimits(max_model_len=256, vocab_size=512, max_kv_tokens=256)
    defaults = GenerationDefaults.load(folder, tokenizer.eos_token_id)
    preprocessor = Preprocessor(tokenizer, limits, defaults)
    return ServedModel(name="team/qwen-like", created=1, limits=limits, tokenizer=tokenizer, preprocessor=preprocessor)


@pytest.fixture
def client_for() -> ClientFor:
    """Opens a client on the app over a door. Faults of the app reach the test as responses, as a client sees them."""

    @asynccontextmanager
    async def open_client(door: Door, config: HttpConfig | None = None) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(build_app(door, config or HttpConfig()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client

    return open_client
