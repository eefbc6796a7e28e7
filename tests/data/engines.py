"""Engines for tests: the real one over a scripted executor, and what it tells of its steps."""

import json
import os
import time
from pathlib import Path
from typing import Any

from nanoserve.core.config import EngineArgs, SchedulerConfig
from nanoserve.core.plan import ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput
from nanoserve.engine.async_engine import AsyncEngine
from nanoserve.engine.core import EngineCore
from nanoserve.serving.replica import Deliver, Engine, Update
from nanoserve.serving.wire import EngineCard

VOCAB = 2048
KILLER = 1999
"""A prompt that begins with this token breaks the executor."""

STEPS_VARIABLE = "NANOSERVE_TEST_STEPS"
"""Where an engine writes its steps: a folder, one file a process."""


class CountingExecutor:
    """Answers with the position of each token. ``step_s``: how long a step takes."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(self.step_s)
        sampled = {request.request_id: self._sample(request) for request in plan.scheduled}
        return ModelRunnerOutput(step_id=plan.step_id, sampled=sampled)

    def _sample(self, request: ScheduledRequest) -> SampledTokens:
        if request.admitted is not None and request.admitted.token_ids[0] == KILLER:
            raise RuntimeError("a deadly prompt")
        if not request.num_samples:
            return SampledTokens()
        return SampledTokens(token_ids=(100 + (request.num_computed_tokens + len(request.token_ids)) % 1000,))

    def close(self) -> None:
        """Nothing is held."""


def answer_to(num_prompt_tokens: int, max_tokens: int) -> list[int]:
    """What ``CountingExecutor`` says after a prompt."""
    return [100 + (num_prompt_tokens + index) % 1000 for index in range(max_tokens)]


def counting_engine(args: EngineArgs, deliver: Deliver) -> tuple[Engine, EngineCard]:
    return _engine(args, deliver, CountingExecutor())


def logging_engine(args: EngineArgs, deliver: Deliver) -> tuple[Engine, EngineCard]:
    """Takes 4 ms a step, and writes down (time, running, waiting) of each."""
    file = (Path(os.environ[STEPS_VARIABLE]) / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def told(update: Update) -> None:
        if update.stats.num_scheduled_tokens:
            stats = update.stats
            file.write(json.dumps([time.time(), stats.num_running, stats.num_waiting]) + "\n")
        deliver(update)

    return _engine(args, told, CountingExecutor(0.004))


def _engine(args: EngineArgs, deliver: Any, executor: CountingExecutor) -> tuple[Engine, EngineCard]:
    config = SchedulerConfig(num_blocks=4096, max_num_seqs=args.max_num_seqs, max_model_len=1024)
    card = EngineCard(
        engine_id=f"{os.getpid()}-{time.time_ns()}",
        max_model_len=1024,
        vocab_size=VOCAB,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=args.max_num_seqs,
        cache_salt="",
        info={"name": "counting", "tasks": ("generate",), "hidden_size": 64},
    )
    return AsyncEngine(EngineCore(executor, config), deliver, heartbeat_s=0.05), card
