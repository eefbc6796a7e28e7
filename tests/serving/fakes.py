"""An engine without a model: a token is a function of (seed, position), so any answer can be checked, however it was
cut, moved or resumed. And the smallest app that streams them."""

import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import EngineDeadError, QueueFullError
from nanoserve.core.outputs import FinishReason, RequestOutput, StepStats
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.serving.replica import Deliver, Engine
from nanoserve.serving.wire import EngineCard

STEP_S = float(os.environ.get("NANOSERVE_TEST_STEP_S", "0.02"))


def token_at(seed: int, position: int) -> int:
    """The token that the fake model puts at ``position`` of the whole sequence."""
    return (seed * 7919 + position * 104729) % 50021


def expected(prompt_token_ids: list[int], seed: int, max_tokens: int) -> list[int]:
    start = len(prompt_token_ids)
    return [token_at(seed, start + index) for index in range(max_tokens)]


@dataclass(frozen=True, slots=True)
class FakeUpdate:
    outputs: tuple[RequestOutput, ...]
    stats: StepStats


@dataclass(frozen=True, slots=True)
class FakeHealth:
    state: str
    reason: str = ""


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    num_tokens: int = 0


class FakeEngine:
    """One thread that gives every running request one token a step. No KV, no queue order: only what a feed can see."""

    def __init__(self, args: EngineArgs, deliver: Deliver) -> None:
        self._args = args
        self._deliver = deliver
        self._lock = threading.Lock()
        self._requests: dict[str, _Running] = {}
        self._aborted = self._finished = self._generated = self._steps = 0
        self._dead = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def submit(self, request: GenerateRequest) -> None:
        if self._dead:
            raise EngineDeadError(self._dead)
        with self._lock:
            if len(self._requests) >= self._args.max_num_seqs + self._args.max_queued_requests:
                raise QueueFullError("The engine's queue is full.", retry_after_s=2.0)
            self._requests[request.request_id] = _Running(request)

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._aborted += self._requests.pop(request_id, None) is not None

    def health(self) -> FakeHealth:
        return FakeHealth("dead", self._dead) if self._dead else FakeHealth("running" if self._requests else "idle")

    def _run(self) -> None:
        while not self._stopped.wait(STEP_S):
            with self._lock:
                outputs = [self._advance(name, running) for name, running in list(self._requests.items())]
            self._steps += 1
            if outputs or self._steps % 10 == 0:
                self._deliver(FakeUpdate(tuple(outputs), self._stats()))

    def _advance(self, request_id: str, running: _Running) -> RequestOutput:
        request = running.request
        limit = request.sampling.max_tokens or 0
        if request.prompt_token_ids[0] == 666:
            self._dead = "A poisoned prompt."
            del self._requests[request_id]
            return RequestOutput(
                request_id=request_id, finish_reason=FinishReason.ERROR, error=("server_error", self._dead)
            )
        token_id = token_at(request.sampling.seed or 0, len(request.prompt_token_ids) + running.num_tokens)
        running.num_tokens += 1
        self._generated += 1
        finished = request.num_prior_output_tokens + running.num_tokens >= limit
        if finished:
            self._finished += 1
            del self._requests[request_id]
        return RequestOutput(
            request_id=request_id,
            new_token_ids=(token_id,),
            finish_reason=FinishReason.LENGTH if finished else None,
        )

    def _stats(self) -> StepStats:
        return StepStats(
            step_id=self._steps,
            num_running=len(self._requests),
            num_blocks=100,
            num_free_blocks=max(0, 100 - len(self._requests)),
            num_generated_tokens_total=self._generated,
            num_finished_total=self._finished,
            num_aborted_total=self._aborted,
        )


def make_engine(args: EngineArgs, deliver: Deliver) -> tuple[Engine, EngineCard]:
    card = EngineCard(
        engine_id=f"{os.getpid()}-{time.time_ns()}",
        max_model_len=4096,
        vocab_size=50021,
        num_blocks=100,
        block_size=16,
        max_num_seqs=args.max_num_seqs,
        info={"name": "fake", "pid": os.getpid()},
    )
    return FakeEngine(args, deliver), card


def make_app(door: Any, scrape: Callable[[], Any], args: Any) -> Any:
    """POST /generate {"prompt": [ids], "max_tokens": n, "seed": s}: a stream of data lines, one list of ids each."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse

    from nanoserve.core.errors import NanoserveError

    app = FastAPI()
    counter = iter(range(10**9))

    @app.get("/health")
    async def health() -> Any:
        trouble = door.trouble()
        engines = [{"replica": peer.peer_id, "pid": peer.card.info["pid"] if peer.card else 0} for peer in door.peers]
        body = {"reason": trouble, "engines": engines, "pid": os.getpid()}
        return JSONResponse(body, 503 if trouble else 200)

    @app.get("/metrics")
    async def metrics() -> Any:
        return Response(await scrape(), media_type="text/plain")

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
