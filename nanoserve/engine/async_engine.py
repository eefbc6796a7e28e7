"""The engine on a thread of its own: requests go in by an inbox, news comes out by one call a step.

Invariant: every accepted request gets exactly one output with a finish reason, whatever happens to the engine.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Literal

from nanoserve.core.errors import EngineDeadError, InvalidRequestError, UnavailableError
from nanoserve.core.outputs import FinishReason, RequestOutput, StepStats
from nanoserve.core.request import GenerateRequest, Grammar
from nanoserve.engine.core import EngineCore, EngineUpdate

logger = logging.getLogger(__name__)

_COMPILERS = 2  # so that one heavy grammar does not hold up all others
_NOT_STARTED = (EngineDeadError.type, "The engine has not been started.")
_STOPPED = (UnavailableError.type, "The engine was stopped.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """``stuck``: requests are open and nothing has moved for long. ``last_progress_s``: seconds since something did."""

    state: Literal["idle", "running", "stuck", "dead"]
    reason: str
    last_progress_s: float


class AsyncEngine:
    """Owns the engine thread and the set of open requests; every method may be called from any thread.

    ``deliver`` is called on the engine thread: once a step, and every ``heartbeat_s`` while there is nothing to do. It
    must not block. A step may take long (a huge prompt on a small machine): ``beats`` counts what its executor has done
    within it, and only one in which that stands still for ``stuck_after_s`` counts as stuck.

    ``compile_grammar`` is called beside the engine thread for each request with a grammar, before the engine sees it;
    what it returns is kept until the request ends.
    """

    def __init__(
        self,
        core: EngineCore,
        deliver: Callable[[EngineUpdate], None],
        *,
        heartbeat_s: float = 0.25,
        stuck_after_s: float = 20.0,
        beats: Callable[[], int] = lambda: 0,
        compile_grammar: Callable[[Grammar], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._deliver = deliver
        self._heartbeat_s = heartbeat_s
        self._stuck_after_s = stuck_after_s
        self._beats = beats
        self._num_beats = 0
        self._clock = clock
        # A request to add, a request id to abort, or None to stop.
        self._inbox: SimpleQueue[GenerateRequest | str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nanoserve-engine", daemon=True)
        self._lock = threading.Lock()
        self._open: dict[str, object] = {}  # by request id, what is kept for it
        self._compile_grammar = compile_grammar
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="nanoserve-grammar")
        self._compiling: dict[str, bool] = {}  # by request id, whether it was aborted meanwhile
        self._num_inbound = 0
        self._num_inbound_tokens = 0
        self._end: tuple[str, str] | None = _NOT_STARTED
        self._last_progress = clock()
        self._last_stats = StepStats()

    def start(self) -> None:
        """Start the thread; once."""
        self._end = None
        self._last_progress = self._clock()
        self._thread.start()

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request without waiting for the engine.

        Raises:
            InvalidRequestError: it can never fit, or its id is in use.
            QueueFullError: the queue's bounds are reached.
            EngineDeadError: the engine does not run.
        """
        self._core.scheduler.validate(request)
        num_tokens = len(request.prompt_token_ids)
        with self._lock:
            if self._end is not None:
                raise EngineDeadError(self._end[1])
            if request.request_id in self._open:
                raise InvalidRequestError(
                    f"`request_id` must be unique among open requests. Given: {request.request_id!r}.",
                    param="request_id",
                )
            self._core.scheduler.check_queue(
                request, num_inbound=self._num_inbound, num_inbound_tokens=self._num_inbound_tokens
            )
            self._open[request.request_id] = None
            self._num_inbound += 1
            self._num_inbound_tokens += num_tokens
            if request.grammar is None:
                self._inbox.put(request)
            else:
                self._compiling[request.request_id] = False
                self._compilers.submit(self._compile, request, request.grammar)

    def abort(self, request_id: str) -> None:
        """End a request before the next plan but one; an unknown or finished one is ignored."""
        with self._lock:
            if request_id in self._compiling:
                self._compiling[request_id] = True
                return
        self._inbox.put(request_id)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End every open request with an error and join the thread; idempotent.

        A thread that hangs in a step for ``timeout_s`` is left behind (it ends with the process), and the last
        ``deliver`` happens on the caller's thread.
        """
        self._inbox.put(None)
        self._compilers.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("engine thread hangs in a step timeout_s=%s", timeout_s)
        self._end_all(_STOPPED)

    def health(self) -> EngineHealth:
        """The truth about the engine now; never waits for it."""
        with self._lock:
            if (num_beats := self._beats()) != self._num_beats:
                self._num_beats, self._last_progress = num_beats, self._clock()
            age_s = self._clock() - self._last_progress
            num_open = len(self._open)
            if self._end is not None:
                return EngineHealth(state="dead", reason=self._end[1], last_progress_s=age_s)
        if not num_open:
            return EngineHealth(state="idle", reason="No requests.", last_progress_s=age_s)
        if age_s > self._stuck_after_s:
            reason = f"Nothing has moved for {age_s:.0f} s with {num_open} open requests."
            return EngineHealth(state="stuck", reason=reason, last_progress_s=age_s)
        return EngineHealth(state="running", reason=f"{num_open} open requests.", last_progress_s=age_s)

    def _compile(self, request: GenerateRequest, grammar: Grammar) -> None:
        """On a compiler's thread: hands the request on, whatever comes of its grammar."""
        kept = None
        try:
            kept = self._compile_grammar(grammar)
        except Exception:  # the executor meets it again and ends this request alone
            logger.exception("grammar failed to compile request_id=%s", request.request_id)
        with self._lock:
            if request.request_id in self._open:
                self._open[request.request_id] = kept
            self._inbox.put(request)
            if self._compiling.pop(request.request_id):
                self._inbox.put(request.request_id)

    # On the engine thread

    def _run(self) -> None:
        end = _STOPPED
        try:
            while self._read_inbox():
                self._hand_over(self._core.step() if self._core.has_work else self._core.idle())
        except BaseException as error:  # a thread that just vanished would leave every client waiting
            logger.exception("engine failed step_id=%s", self._last_stats.step_id + 1)
            end = (EngineDeadError.type, f"The engine failed: {_first_line(error)}.")
        self._end_all(end)
        try:
            self._core.close()
        except Exception:
            logger.exception("executor failed to close")

    def _read_inbox(self) -> bool:
        """Take all that came, waiting for the first only when there is nothing else to do; False means stop."""
        try:
            message = self._inbox.get(block=not self._core.has_work, timeout=self._heartbeat_s)
            while message is not None:
                self._take(message)
                message = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _take(self, message: GenerateRequest | str) -> None:
        if isinstance(message, str):
            self._core.abort(message)
            return
        with self._lock:  # a request is counted either as inbound or as waiting, never as both or neither
            self._num_inbound -= 1
            self._num_inbound_tokens -= len(message.prompt_token_ids)
            self._core.scheduler.enqueue(message)

    def _hand_over(self, update: EngineUpdate) -> None:
        with self._lock:
            self._last_progress = self._clock()
            self._last_stats = update.stats
            if self._end is not None:  # stop() gave up on this thread and told everybody
                return
            for output in update.outputs:
                if output.finish_reason:
                    self._open.pop(output.request_id, None)
        self._deliver(update)

    def _end_all(self, end: tuple[str, str]) -> None:
        """Accept nothing more and end every open request with this error; only the first end counts."""
        with self._lock:
            if self._end not in (None, _NOT_STARTED):
                return
            self._end = end
            open_ids, self._open = sorted(self._open), {}
            stats = replace(
                self._last_stats,
                num_running=0,
                num_waiting=0,
                num_waiting_tokens=0,
                num_free_blocks=self._last_stats.num_blocks,
                num_scheduled_tokens=0,
                blocks_published=(),
                blocks_evicted=(),
                queue_times_s=(),
            )
        outputs = tuple(RequestOutput(id_, finish_reason=FinishReason.ERROR, error=end) for id_ in open_ids)
        try:
            self._deliver(EngineUpdate(outputs=outputs, stats=stats))
        except Exception:
            logger.exception("the last outputs could not be delivered num_requests=%s", len(outputs))


def _first_line(error: BaseException) -> str:
    """The error's class and the first line of its message, for users: what follows may name files."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]:.200}".rstrip(".") if lines else type(error).__name__
