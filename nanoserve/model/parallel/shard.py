"""A shard: one process that holds its rank's share of the network and follows rank 0's plans until that hangs up.

``run`` is what a launcher calls; as a program it is a child process that reads its order from standard input.
"""

import logging
import os
import signal
import sys
import threading
import time
from queue import SimpleQueue

import msgspec

from nanoserve.core.errors import ShardLostError
from nanoserve.model.build import build_rank
from nanoserve.model.kernels.native import library
from nanoserve.model.parallel.channel import (
    Allocate,
    Channel,
    Failed,
    Hello,
    Loaded,
    Meeting,
    Message,
    Start,
    Step,
    call,
)
from nanoserve.model.parallel.collective import Collective
from nanoserve.model.parallel.distributed import Distributed
from nanoserve.model.parallel.group import BEAT_S
from nanoserve.model.parallel.launcher import Order
from nanoserve.model.parallel.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

_DESERTED_S = 60.0
"""After this silence a rank 0 on another machine is gone; on the same machine the socket tells at once."""


def run(meeting: Meeting, rank: int) -> None:
    """Never returns: the process ends with rank 0.

    Raises:
        OSError, ShardLostError: rank 0 was gone before it said what to load.
    """
    channel = call(meeting)
    channel.send(Hello(rank, meeting.secret, library() is not None))
    file = channel.receive_file()
    start = channel.first()
    assert isinstance(start, Start), start
    inbox: SimpleQueue[Message] = SimpleQueue()
    reader = _Reader(channel, inbox)
    reader.start()
    threading.Thread(target=_beat, args=(channel,), daemon=True).start()
    try:
        _work(start, rank, file, channel, inbox)
    except ShardLostError:
        reader.join()  # rank 0 knows more, and hangs up
    except BaseException as error:
        logger.exception("shard failed rank=%d", rank)
        channel.send(Failed(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]))
        reader.join()


def _work(start: Start, rank: int, file: int | None, channel: Channel, inbox: "SimpleQueue[Message]") -> None:
    def agree(num_blocks: int, weights_bytes: int) -> tuple[int, int]:
        channel.send(Loaded(num_blocks, weights_bytes))
        answer = inbox.get()
        assert isinstance(answer, Allocate), answer
        return answer.num_blocks, weights_bytes

    runner = build_rank(start.args, _collective(start, rank, file), agree).runner
    while True:
        message = inbox.get()
        assert isinstance(message, Step), message
        runner.execute(message.plan)


def _collective(start: Start, rank: int, file: int | None) -> Collective:
    size = start.args.tensor_parallel_size
    if file is not None:
        native = library()
        assert native is not None, "it was said to be there"
        shared = SharedMemory(native, file, rank, size)
        os.close(file)
        return shared
    assert start.rendezvous is not None, start
    return Distributed(start.collective, Distributed.find(start.rendezvous), rank, size)


class _Reader(threading.Thread):
    """Takes messages in, so that the end of rank 0 is seen in the middle of a step too, and ends the process."""

    def __init__(self, channel: Channel, inbox: "SimpleQueue[Message]") -> None:
        super().__init__(daemon=True)
        self._channel, self._inbox = channel, inbox
        self.heard_s = time.monotonic()

    def run(self) -> None:
        if not self._channel.is_local:
            threading.Thread(target=self._end_when_deserted, daemon=True).start()
        while (messages := self._channel.receive()) is not None:
            self.heard_s = time.monotonic()
            for message in messages:
                if isinstance(message, Allocate | Step):
                    self._inbox.put(message)
        os._exit(0)

    def _end_when_deserted(self) -> None:
        before_s = time.monotonic()
        while time.monotonic() - self.heard_s < _DESERTED_S:
            time.sleep(BEAT_S)
            now_s = time.monotonic()
            if (late_s := now_s - before_s - BEAT_S) > BEAT_S:  # this process was stopped meanwhile
                self.heard_s += late_s
            before_s = now_s
        os._exit(0)


def _beat(channel: Channel) -> None:
    while True:
        time.sleep(BEAT_S)
        try:
            channel.beat()
        except OSError:  # the reader sees it too
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, whose end is this one's
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    try:
        run(order.meeting, order.rank)
    except (OSError, ShardLostError):
        sys.exit(1)
