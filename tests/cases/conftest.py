"""The whole service in this process, but Ray: app, text, engine thread, model; one served checkpoint a test."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from nanoserve.core.config import EngineArgs
from nanoserve.engine.core import EngineCore
from nanoserve.model.build import build
from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.preprocess import ModelLimits, Preprocessor
from nanoserve.text.tokenizer import Tokenizer
from tests.cases import rig as rig_module
from tests.cases.service import Service
from tests.serving.local_door import LocalDoor

Serve = Callable[..., AbstractAsyncContextManager[Service]]


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> rig_module.Rig:
    return rig_module.Rig(tmp_path_factory.mktemp("rig"))


@pytest.fixture
def serve() -> Serve:
    """Serves a checkpoint: ``async with serve(folder, max_model_len=64) as service``.

    In the end it must be alive and drained, unless ``survives`` is off.
    """

    @asynccontextmanager
    async def open_service(
        folder: Path, *, reasoning: bool = True, survives: bool = True, **args: Any
    ) -> AsyncIterator[Service]:
        torch.set_num_threads(1)
        settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 2048}
        loaded = build(EngineArgs(model=str(folder), **(settings | args)))
        served = served_model(folder, loaded.scheduler, loaded.info.vocab_size, reasoning=reasoning)
        core = EngineCore(loaded.runner, loaded.scheduler)
        door = LocalDoor(core, [served], compile_grammar=loaded.compile_grammar)
        door.engine.start()
        transport = httpx.ASGITransport(build_app(door, HttpConfig()), raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                service = Service(client, door, served)
                before = await service.canary()
                yield service
                if survives:
                    assert await service.canary() == before
                    await service.drained()
        finally:
            door.engine.stop()

    return open_service


def served_model(folder: Path, counts: Any, vocab_size: int, *, reasoning: bool) -> ServedModel:
    tokenizer = Tokenizer.load(folder)
    limits = ModelLimits(
        max_model_len=counts.max_model_len,
        vocab_size=vocab_size,
        max_kv_tokens=counts.num_blocks * counts.block_size,
    )
    defaults = GenerationDefaults.load(folder, tokenizer.eos_token_id)
    preprocessor = Preprocessor(tokenizer, limits, defaults, reasoning=reasoning)
    return ServedModel(name="team/case", created=1, limits=limits, tokenizer=tokenizer, preprocessor=preprocessor)
