"""The real engine over a fake model: a token is a function of (seed, position), so any answer can be checked, however
it was cut, moved or resumed. And the smallest app that streams it."""

import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from nanoserve.core.config import EngineArgs, SchedulerConfig
from nanoserve.core.errors import CheckpointError, NanoserveError, QueueFullError
from nanoserve.core.plan import ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.engine.async_engine import AsyncEngine
from nanoserve.engine.core import EngineCore
from nanoserve.serving.backstage import Backstage
from nanoserve.serving.feed import FeedDoor
from nanoserve.serving.replica import Deliver, Engine
from nanoserve.serving.wire import EngineCard

STEP_S = float(os.environ.get("NANOSERVE_TEST_STEP_S", "0.02"))
NUM_BLOCKS = 4096
POISON = 666


def token_at(seed: int, position: int) -> int:
    """The token that the fake model puts at ``position`` of the whole sequence."""
    return (seed * 7919 + position * 104729) % 50021


def expected(prompt_token_ids: list[int], seed: int, max_tokens: int) -> list[int]:
    start = len(prompt_token_ids)
    return [token_at(seed, start + index) for index in range(max_tokens)]


class FakeExecutor:
    """Takes ``STEP_S`` a step; a prompt that begins with ``POISON`` breaks it."""

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(STEP_S)
        for request_id in plan.released_request_ids:
            self._seeds.pop(request_id, None)
        sampled = {request.request_id: self._sample(request) for request in plan.scheduled}
        return ModelRunnerOutput(step_id=plan.step_id, sampled=sampled)

    def _sample(self, request: ScheduledRequest) -> SampledTokens:
        if request.admitted is not None:
            if request.admitted.token_ids[0] == POISON:
                raise RuntimeError("a poisoned prompt")
            self._seeds[request.request_id] = request.admitted.sampling.seed or 0
        if not request.num_samples:
            return SampledTokens()
        position = request.num_computed_tokens + len(request.token_ids)
        return SampledTokens(token_ids=(token_at(self._seeds[request.request_id], position),))

    def close(self) -> None:
        self._seeds.clear()


def make_engine(args: EngineArgs, deliver: Deliver) -> tuple[Engine, EngineCard]:
    if args.model == "broken":
        raise CheckpointError("model.safetensors: the tensor lm_head.weight is missing.")
    config = SchedulerConfig(
        num_blocks=NUM_BLOCKS,
        block_size=16,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_queued_requests=args.max_queued_requests,
    )
    card = EngineCard(
        engine_id=f"{os.getpid()}-{time.time_ns()}",
        max_model_len=config.max_model_len,
        vocab_size=50021,
        num_blocks=NUM_BLOCKS,
        block_size=16,
        cache_salt="",
        max_num_seqs=args.max_num_seqs,
        info={"name": "fake", "pid": os.getpid()},
    )
    return AsyncEngine(EngineCore(FakeExecutor(), config), deliver), card


def make_app(doors: Mapping[str, FeedDoor], backstage: Backstage, args: Any) -> Any:
    """POST /generate {"prompt": [ids], "max_tokens": n, "seed": s}: a stream of data lines, one list of ids each."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse

    app = FastAPI()
    door = next(iter(doors.values()))
    counter = iter(range(10**9))

    @app.get("/health")
    async def health() -> Any:
        trouble = door.trouble()
        engines = [{"replica": peer.peer_id, "pid": peer.card.info["pid"] if peer.card else 0} for peer in door.peers]
        body = {"reason": trouble, "engines": engines, "pid": os.getpid()}
        return JSONResponse(body, 503 if trouble else 200)

    @app.get("/metrics")
    async def metrics() -> Any:
        return Response(await backstage.scrape(), media_type="text/plain")

    @app.post("/generate")
    async def generate(request: Request) -> Any:
        body = await request.json()
        sampling = SamplingParams(max_tokens=body["max_tokens"], seed=body["seed"])
        try:
            stream = await door.open(
                GenerateRequest(
                    request_id=f"{os.getpid()}-{next(counter)}",
                    prompt_token_ids=tuple(body["prompt"]),
                    sampling=sampling,
                )
            )
        except QueueFullError as error:
            return JSONResponse({"error": error.message}, 429, {"retry-after": str(error.retry_after_s)})
        except NanoserveError as error:
            return JSONResponse({"error": error.message}, 503)

        async def events() -> AsyncIterator[str]:
            try:
                while True:
                    output = await stream.next()
                    reason = output.finish_reason
                    event = {"ids": output.new_token_ids, "finish": reason, "error": output.error}
                    yield f"data: {json.dumps(event)}\n\n"
                    if reason is not None:
                        return
            finally:
                stream.close()

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def build(args: dict[str, Any]) -> Any:
    """A Serve builder for the fake service."""
    from nanoserve.serving.app import assemble
    from nanoserve.serving.config import ServingArgs

    return assemble(ServingArgs.model_validate(args), make_engine, make_app)
