"""A client that does not read: its stream waits for it, for a while, and then is given up."""

import asyncio
from typing import Any

from nanoserve.serving.answer import EventAnswer, EventWriter


class Connection:
    """One client. ``reads`` is cleared while it takes nothing."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.sent: list[bytes] = []

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message.get("body", b""))

    async def receive(self) -> Any:
        await asyncio.Event().wait()


class Producer:
    """Writes numbers for ever; ``closed`` once its answer was ended."""

    def __init__(self) -> None:
        self.num_written = 0
        self.closed = False

    async def __call__(self, writer: EventWriter) -> None:
        try:
            while True:
                await writer.write(b"data: %d\n\n" % self.num_written)
                self.num_written += 1
                await asyncio.sleep(0.005)
        finally:
            self.closed = True


async def test_a_stream_that_is_not_read_is_dropped() -> None:
    connection, producer = Connection(), Producer()
    answer = EventAnswer(producer, idle_s=0.02, stall_s=0.2)
    async with asyncio.timeout(5):
        await answer({"type": "http"}, connection.receive, connection.send)
    assert producer.closed
    assert producer.num_written == 0


async def test_a_reader_that_pauses_loses_nothing() -> None:
    connection, producer = Connection(), Producer()
    answer = EventAnswer(producer, idle_s=0.02, stall_s=2.0)
    running = asyncio.ensure_future(answer({"type": "http"}, connection.receive, connection.send))
    connection.reads.set()
    for _ in range(3):
        await asyncio.sleep(0.02)
        connection.reads.clear()
        await asyncio.sleep(0.1)
        connection.reads.set()
    await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    words = [body for body in connection.sent if body.startswith(b"data")]
    assert words == [b"data: %d\n\n" % number for number in range(len(words))]
    assert len(words) > 3
