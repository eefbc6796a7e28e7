"""The app on a real uvicorn, for what only a socket can do: leave."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[int]:
    """The port of a server that runs in this loop until the block ends."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server._serve([listener]))  # serve() would take the process's signal handlers
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()


class RawClient:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> "RawClient":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def post(self, path: str, body: bytes, *, version: str = "1.1", headers: str = "") -> None:
        head = f"POST {path} HTTP/{version}\r\nHost: test\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(body)}\r\n{headers}\r\n".encode() + body)
        await self.writer.drain()

    async def leave(self, *, reset: bool = False) -> None:
        """Closes the connection; ``reset`` sends RST instead of FIN."""
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.writer.transport.abort()
        else:
            self.writer.close()
            await self.writer.wait_closed()
