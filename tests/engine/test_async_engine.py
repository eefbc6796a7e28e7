"""The engine's thread: nothing blocks a caller, nobody waits for ever, health tells the truth."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest

from nanoserve.core.errors import EngineDeadError, InvalidRequestError, QueueFullError
from nanoserve.core.outputs import FinishReason, RequestOutput, StepStats
from nanoserve.core.plan import SchedulerOutput
from nanoserve.core.request import GenerateRequest, Grammar
from nanoserve.engine.async_engine import AsyncEngine
from nanoserve.engine.core import EngineCore, EngineUpdate
from tests.engine.driving import VOCAB_SIZE, make_config, make_request
from tests.fakes import FakeExecutor, alone

TIMEOUT_S = 20.0


class Gate:
    """Lets the test decide when a step may run: the engine reports each plan and waits for a permit."""

    def __init__(self) -> None:
        self.plans: Queue[SchedulerOutput] = Queue()
        self.permits = threading.Semaphore(0)

    def __call__(self, plan: SchedulerOutput) -> None:
        self.plans.put(plan)
        assert self.permits.acquire(timeout=TIMEOUT_S)

    def let_step(self) -> SchedulerOutput:
        """Wait until the engine stands before a step and let it run."""
        plan = self.plans.get(timeout=TIMEOUT_S)
        self.permits.release()
        return plan


class Door:
    """Collects what is delivered, and waits for what the test expects."""

    def __init__(self) -> None:
        self.updates: Queue[EngineUpdate] = Queue()
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.threads: set[str] = set()

    def __call__(self, update: EngineUpdate) -> None:
        self.threads.add(threading.current_thread().name)
        self.updates.put(update)

    def wait_for(self, condition: Callable[[EngineUpdate], bool]) -> EngineUpdate:
        while True:
            update = self.updates.get(timeout=TIMEOUT_S)
            for output in update.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            if condition(update):
                return update

    def wait_until_finished(self, *request_ids: str) -> EngineUpdate:
        return self.wait_for(lambda _: all(self.finish_reason(id_) is not None for id_ in request_ids))

    def finish_reason(self, request_id: str) -> FinishReason | None:
        outputs = self.outputs.get(request_id)
        return outputs[-1].finish_reason if outputs else None

    def token_ids(self, request_id: str) -> list[int]:
        return [token_id for output in self.outputs[request_id] for token_id in output.new_token_ids]


@contextmanager
def engine(
    door: Door,
    *,
    before_step: Callable[[SchedulerOutput], None] = lambda plan: None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[AsyncEngine]:
    settings = make_config(**(config or {}))
    executor = FakeExecutor(settings, vocab_size=VOCAB_SIZE, before_step=before_step)
    running = AsyncEngine(EngineCore(executor, settings), door, heartbeat_s=0.01, **options)
    running.start()
    try:
        yield running
    finally:
        running.stop(TIMEOUT_S)


def is_all_zero(stats: StepStats) -> bool:
    return (stats.num_running, stats.num_waiting) == (0, 0) and stats.num_free_blocks == stats.num_blocks


def test_many_threads_get_the_answers_that_each_request_gets_alone() -> None:
    door, config = Door(), {"num_blocks": 9, "max_num_seqs": 16}
    requests = [make_request(f"r{i}", 3 + i, max_tokens=32 - i) for i in range(16)]
    with engine(door, config=config) as running:
        threads = [threading.Thread(target=running.submit, args=(request,)) for request in requests]
        for thread in threads:
            thread.start()
        update = door.wait_until_finished(*(request.request_id for request in requests))
        assert is_all_zero(update.stats), "the last step's own update tells that nothing is left"
        assert running.health().state == "idle"
    for request in requests:
        assert door.token_ids(request.request_id) == alone(request, make_config(**config), VOCAB_SIZE).token_ids
    assert door.threads == {"nanoserve-engine"}


def test_an_idle_engine_keeps_reporting() -> None:
    door = Door()
    with engine(door):
        for _ in range(3):
            assert is_all_zero(door.wait_for(lambda _: True).stats)


def test_submit_refuses_at_once_while_a_step_runs() -> None:
    """Validation, double ids and the bounded queue are judged in the caller's thread, with the inbox counted in."""
    door, gate = Door(), Gate()
    with engine(door, before_step=gate, config={"max_num_seqs": 1, "max_queued_requests": 2}) as running:
        running.submit(make_request("a", 3, max_tokens=1))
        gate.plans.get(timeout=TIMEOUT_S)  # the engine stands in the step
        with pytest.raises(InvalidRequestError, match="context"):
            running.submit(make_request("huge", 1000))
        with pytest.raises(InvalidRequestError, match="request_id"):
            running.submit(make_request("a", 3))
        running.submit(make_request("b", 3, max_tokens=1))
        running.submit(make_request("c", 3, max_tokens=1))
        with pytest.raises(QueueFullError):
            running.submit(make_request("d", 3, max_tokens=1))
        gate.permits.release(10)
        door.wait_until_finished("a", "b", "c")
        running.submit(make_request("a", 3, max_tokens=1))
        door.outputs.clear()
        door.wait_until_finished("a")


def test_an_abort_frees_the_blocks_before_the_next_plan_but_one() -> None:
    door, gate = Door(), Gate()
    with engine(door, before_step=gate) as running:
        running.submit(make_request("gone", 8, max_tokens=20))
        gate.let_step()
        gate.plans.get(timeout=TIMEOUT_S)  # the next plan is made, and holds the request
        running.submit(make_request("stays", 2, max_tokens=2))
        running.abort("gone")
        running.abort("nobody")
        gate.permits.release()
        plan = gate.let_step()
        assert [request.request_id for request in plan.scheduled] == ["stays"]
        assert plan.released_request_ids == ("gone",)
        gate.permits.release(10)
        door.wait_until_finished("gone", "stays")
        assert door.finish_reason("gone") is FinishReason.ABORT


def test_an_abort_of_the_only_request_is_told_and_leaves_nothing() -> None:
    door, gate = Door(), Gate()
    with engine(door, before_step=gate) as running:
        running.submit(make_request("r", 8, max_tokens=20))
        gate.plans.get(timeout=TIMEOUT_S)
        running.abort("r")
        gate.permits.release()
        assert is_all_zero(door.wait_until_finished("r").stats)
        assert running.health().state == "idle"
        assert gate.plans.empty(), "a step was executed for nobody"


def test_an_executor_that_raises_ends_every_request_with_the_reason() -> None:
    def fail(plan: SchedulerOutput) -> None:
        if plan.step_id == 2:
            raise RuntimeError("the device fell off\n  at /some/file.py")

    door = Door()
    with engine(door, before_step=fail, config={"max_num_seqs": 1}) as running:
        for name in ("running", "waiting"):
            running.submit(make_request(name, 3, max_tokens=9))
        update = door.wait_until_finished("running", "waiting")
        for output in update.outputs:
            assert output.error == ("server_error", "The engine failed: RuntimeError: the device fell off.")
        assert is_all_zero(update.stats)
        assert running.health().state == "dead"
        assert "fell off" in running.health().reason
        with pytest.raises(EngineDeadError, match="fell off"):
            running.submit(make_request("late", 3))


def test_a_step_is_stuck_only_after_the_limit_and_stop_still_answers_everybody() -> None:
    now_s = [0.0]
    door, gate = Door(), Gate()
    with engine(door, before_step=gate, stuck_after_s=60.0, clock=lambda: now_s[0]) as running:
        assert running.health().state == "idle"
        running.submit(make_request("r", 3, max_tokens=9))
        gate.plans.get(timeout=TIMEOUT_S)
        now_s[0] = 59.0
        assert running.health().state == "running", "slow is not stuck"
        now_s[0] = 61.0
        health = running.health()
        assert (health.state, health.last_progress_s) == ("stuck", 61.0)
        running.stop(timeout_s=0.01)
        update = door.wait_until_finished("r")
        assert update.outputs[0].error == ("service_unavailable_error", "The engine was stopped.")
        assert running.health().state == "dead"
        gate.permits.release(10)
        running.stop(TIMEOUT_S)
        assert door.updates.empty(), "a thread that woke up late speaks again"


def test_a_step_that_moves_on_is_never_stuck_however_long_it_takes() -> None:
    now_s, num_beats = [0.0], [0]
    door, gate = Door(), Gate()
    with engine(door, before_step=gate, clock=lambda: now_s[0], beats=lambda: num_beats[0]) as running:
        running.submit(make_request("r", 3, max_tokens=9))
        gate.plans.get(timeout=TIMEOUT_S)
        for _ in range(10):
            now_s[0] += 19.0
            num_beats[0] += 1
            assert running.health().state == "running"
        now_s[0] += 21.0
        assert running.health().state == "stuck"
        gate.permits.release(20)


def test_a_grammar_compiles_beside_the_steps_of_the_others() -> None:
    door, begun, permit = Door(), threading.Event(), threading.Event()

    def compile_grammar(grammar: Grammar) -> object:
        if grammar.text == "broken":
            raise RuntimeError("it fell over")
        begun.set()
        assert permit.wait(TIMEOUT_S)
        return object()

    def bound(name: str, text: str) -> GenerateRequest:
        return replace(make_request(name, 3, max_tokens=2), grammar=Grammar(text, (0,)))

    with engine(door, compile_grammar=compile_grammar) as running:
        for name in ("heavy", "gone"):
            running.submit(bound(name, "heavy"))
        assert begun.wait(TIMEOUT_S)
        running.submit(make_request("free", 3, max_tokens=5))
        door.wait_until_finished("free")
        running.abort("gone")
        with pytest.raises(InvalidRequestError, match="request_id"):
            running.submit(make_request("heavy", 3))
        assert door.finish_reason("heavy") is None
        assert running.health().state == "running"
        permit.set()
        running.submit(bound("broken", "broken"))
        update = door.wait_until_finished("heavy", "gone", "broken")
        assert is_all_zero(update.stats)
        assert running.health().state == "idle"
    assert door.finish_reason("gone") is FinishReason.ABORT
    assert door.finish_reason("heavy") is door.finish_reason("broken") is FinishReason.LENGTH


def test_stopping_while_a_grammar_compiles_ends_its_request() -> None:
    door, permit = Door(), threading.Event()
    with engine(door, compile_grammar=lambda _: permit.wait(TIMEOUT_S)) as running:
        running.submit(replace(make_request("r", 3), grammar=Grammar("x", (0,))))
        running.stop(TIMEOUT_S)
        assert door.wait_until_finished("r").outputs[0].finish_reason is FinishReason.ERROR
        permit.set()


def test_stop_ends_open_requests_closes_the_executor_and_can_be_repeated() -> None:
    door, gate, config = Door(), Gate(), make_config()
    executor = FakeExecutor(config, before_step=gate)
    running = AsyncEngine(EngineCore(executor, config), door)
    assert running.health().state == "dead"
    with pytest.raises(EngineDeadError, match="not been started"):
        running.submit(make_request("early", 3))
    running.start()
    running.submit(make_request("r", 3, max_tokens=9))
    gate.plans.get(timeout=TIMEOUT_S)
    gate.permits.release(100)
    running.stop()
    running.stop()
    assert executor.is_closed
    assert door.wait_until_finished("r").outputs[0].finish_reason in (FinishReason.ERROR, FinishReason.LENGTH)
    with pytest.raises(EngineDeadError, match="stopped"):
        running.submit(make_request("late", 3))


def test_the_engine_knows_neither_torch_nor_ray_nor_text() -> None:
    code = (
        "import sys, nanoserve.engine.async_engine, nanoserve.engine.core\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'numpy', 'pydantic') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
