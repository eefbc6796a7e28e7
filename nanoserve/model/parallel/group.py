"""Rank 0's side of the shards: starts them, hands them every plan, and notices when one of them is lost.

A group that has lost a shard is of no further use: it says why (``fault``), wakes whoever waits for the shard, and
sends the others away. Nothing here waits for a shard without an end.
"""

import logging
import os
import secrets
import selectors
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ConfigError, ShardLostError
from nanoserve.core.plan import AdmittedState, ModelRunnerOutput, SchedulerOutput
from nanoserve.core.sampling import SamplingParams
from nanoserve.model.kernels.native import library
from nanoserve.model.parallel.channel import (
    Allocate,
    Beat,
    Caller,
    Channel,
    Failed,
    Listener,
    Loaded,
    Start,
    Step,
    framed,
)
from nanoserve.model.parallel.collective import ALONE, Collective
from nanoserve.model.parallel.launcher import Launcher

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENCE_S = 10.0
"""How long a shard may be silent. Its beats come from a thread of their own: a long step is no silence."""

LOADING_SILENCE_S = 120.0
START_TIMEOUT_S = 300.0
_LEAVE_S = 1.0
_LOOK_S = 0.2


class ShardGroup:
    """The shards of one engine and the thread that watches them. ``fault``: why the group is lost, once it is."""

    def __init__(self, args: EngineArgs, launcher: Launcher, *, on_gpus: bool) -> None:
        """Starts the shards and waits until all have called; they then load while this rank does.

        Raises:
            ShardLostError: one did not come.
            ConfigError: the ranks cannot be joined in this process.
        """
        self.fault: str | None = None
        self._limit_s = LOADING_SILENCE_S
        self._launcher = launcher
        self._news: SimpleQueue[Loaded] = SimpleQueue()
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._watcher = threading.Thread(target=self._watch_to_the_end, name="nanoserve-shards", daemon=True)
        self.collective: Collective = ALONE
        listener = Listener(launcher.host, secrets.token_hex(16))
        try:
            launcher.start(listener.meeting, args.tensor_parallel_size)
            callers = self._gather(listener, args.tensor_parallel_size)
            self.collective = self._join(args, callers, on_gpus=on_gpus)
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    def _gather(self, listener: Listener, num_ranks: int) -> list[Caller]:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        callers: list[Caller] = []
        while len(callers) < num_ranks - 1:
            if (caller := listener.accept()) is not None:
                callers.append(caller)
                self._channels[caller.hello.rank] = caller.channel
            elif (reason := self._launcher.died()) is not None or time.monotonic() > give_up_s:
                missing = min(set(range(1, num_ranks)) - self._channels.keys())
                raise ShardLostError(f"The engine could not start: {reason or f'shard {missing} did not call'}.")
            else:
                time.sleep(0.02)
        return callers

    def _join(self, args: EngineArgs, callers: list[Caller], *, on_gpus: bool) -> Collective:
        """Through shared memory where all ranks are processes of this machine's CPUs."""
        from nanoserve.model.parallel.distributed import Distributed, Rendezvous
        from nanoserve.model.parallel.shared_memory import SharedMemory

        native, size = library(), args.tensor_parallel_size
        can_share = all(caller.hello.can_share and caller.channel.is_local for caller in callers)
        if native is not None and can_share and not on_gpus:
            file = SharedMemory.create(native, size)
            try:
                self._start(Start(args, SharedMemory.name, None), file)
                return SharedMemory(native, file, 0, size)
            finally:
                os.close(file)
        if args.deterministic:
            raise ConfigError(
                "`deterministic` with several ranks needs the native kernels and all ranks on one machine's CPUs.",
                param="deterministic",
            )
        is_here = all(caller.channel.is_local for caller in callers)
        meeting = Rendezvous("127.0.0.1" if is_here or self._launcher.host is None else self._launcher.host)
        backend = "nccl" if on_gpus else "gloo"
        self._start(Start(args, backend, meeting.address), None)
        return Distributed(backend, meeting.store, 0, size)

    def _start(self, start: Start, file: int | None) -> None:
        for channel in self._channels.values():
            channel.send_file(file)
            channel.send(start)
        self._watcher.start()

    def loaded(self) -> list[Loaded]:
        """What the shards have loaded, once all of them have.

        Raises:
            ShardLostError: one never will.
        """
        loaded: list[Loaded] = []
        while len(loaded) < len(self._channels):
            self.check()
            try:
                loaded.append(self._news.get(timeout=_LOOK_S))
            except Empty:
                continue
        return loaded

    def allocate(self, num_blocks: int) -> None:
        """Lets the shards take their KV memory and wait for plans."""
        self._limit_s = SILENCE_S
        self._tell(Allocate(num_blocks))

    def send(self, plan: SchedulerOutput) -> None:
        """Hands the plan to every shard.

        Raises:
            ShardLostError: the group is lost.
        """
        self._tell(Step(_for_shards(plan)))

    def _tell(self, message: Allocate | Step) -> None:
        self.check()
        frame = framed(message)
        for rank, channel in self._channels.items():
            try:
                channel.send_frame(frame)
            except OSError:
                self._lose(rank, "died")
        self.check()

    def check(self) -> None:
        """
        Raises:
            ShardLostError: the group is lost.
        """
        if self.fault is not None:
            raise ShardLostError(self.fault)

    def close(self) -> None:
        """Sends the shards away and waits for their end; idempotent."""
        with self._lock:
            self._is_closed = True
        for channel in self._channels.values():
            channel.hang_up()
        if self._watcher.is_alive():
            self._watcher.join(_LEAVE_S + 5.0)
        self._launcher.stop()
        self.collective.close()

    # On the watching thread

    def _watch_to_the_end(self) -> None:
        try:
            self._watch()
        except Exception:  # shards that nobody watches could hang unseen
            logger.exception("the shards cannot be watched")
            self._lose(min(self._channels), "cannot be watched")

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            heard_s = dict.fromkeys(self._channels, time.monotonic())
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            before_s = told_s = time.monotonic()
            while self.fault is None and not self._is_closed:
                came = [key.data for key, _ in selector.select(_LOOK_S)]
                now_s = time.monotonic()
                late_s, before_s = now_s - before_s - _LOOK_S, now_s
                if late_s > _LOOK_S:  # a pause of this process is not their silence
                    heard_s = {rank: then_s + late_s for rank, then_s in heard_s.items()}
                for rank in came:
                    self._read(rank)
                    heard_s[rank] = now_s
                self._judge(heard_s, now_s)
                if now_s - told_s > BEAT_S:
                    told_s = now_s
                    self._beat()
            self._see_off(selector)

    def _read(self, rank: int) -> None:
        messages = self._channels[rank].receive()
        if messages is None:
            self._lose(rank, "died")
        for message in messages or ():
            if isinstance(message, Loaded):
                self._news.put(message)
            elif isinstance(message, Failed):
                self._lose(rank, f"failed: {message.reason}")
            else:
                assert isinstance(message, Beat), message

    def _judge(self, heard_s: dict[int, float], now_s: float) -> None:
        for rank, then_s in heard_s.items():
            if now_s - then_s > self._limit_s:
                self._lose(rank, f"did not answer for {now_s - then_s:.0f} s")

    def _beat(self) -> None:
        for rank, channel in self._channels.items():
            try:
                channel.beat()
            except OSError:
                self._lose(rank, "died")

    def _lose(self, rank: int, how: str) -> None:
        with self._lock:
            if self.fault is not None or self._is_closed:
                return
            self.fault = f"shard {rank} {how}"
        logger.error("shard lost rank=%d reason=%s", rank, how)
        self.collective.abort()
        for channel in self._channels.values():
            channel.hang_up()

    def _see_off(self, selector: selectors.BaseSelector) -> None:
        """Shards leave when rank 0 hangs up; one that is stopped cannot, and is killed."""
        give_up_s = time.monotonic() + _LEAVE_S
        left = dict(self._channels)
        while left and (wait_s := give_up_s - time.monotonic()) > 0:
            for key, _ in selector.select(wait_s):
                if self._channels[key.data].receive() is None:
                    selector.unregister(key.fileobj)
                    left.pop(key.data)
        for channel in left.values():
            if (pid := channel.peer_pid()) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for channel in self._channels.values():
            channel.close()


class Runner(Protocol):
    """What computes rank 0's share."""

    @property
    def num_beats(self) -> int: ...

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput: ...

    def close(self) -> None: ...


class RankZero:
    """This rank's runner and the shards as one executor."""

    def __init__(self, runner: Runner, group: ShardGroup) -> None:
        self._runner = runner
        self._group = group

    @property
    def num_beats(self) -> int:
        return self._runner.num_beats

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """
        Raises:
            ShardLostError: the group was lost, and how.
        """
        self._group.send(plan)
        try:
            return self._runner.execute(plan)
        except Exception:
            self._group.check()  # the reason rather than what followed from it
            raise

    def close(self) -> None:
        self._runner.close()
        self._group.close()


_UNSEEN = AdmittedState(token_ids=(), num_prompt_tokens=0, sampling=SamplingParams())


def _for_shards(plan: SchedulerOutput) -> SchedulerOutput:
    """The plan without what only sampling needs."""
    if all(request.admitted is None for request in plan.scheduled):
        return plan
    scheduled = [
        request if request.admitted is None else request._replace(admitted=_UNSEEN) for request in plan.scheduled
    ]
    return replace(plan, scheduled=tuple(scheduled))
