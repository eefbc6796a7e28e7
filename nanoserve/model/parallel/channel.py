"""How rank 0 and a shard talk: one socket each, frames of msgpack. On one machine a unix socket, else TCP.

A frame is its length in four bytes, then one message; never pickle. The connection is also the sign of life: the end of
either process closes it at once, and what hangs without closing it sends no beats.
"""

import hmac
import secrets
import socket
import struct
import sys
import threading
from dataclasses import dataclass

import msgspec

from nanoserve.core.config import EngineArgs
from nanoserve.core.errors import ShardLostError
from nanoserve.core.plan import SchedulerOutput

_HEAD = struct.Struct("<I")
_READ_BYTES = 1 << 16
_GREETING_TIMEOUT_S = 5.0


class Meeting(msgspec.Struct, frozen=True):
    """Where shards find rank 0: ``name`` of a unix socket on its machine, else ``address`` (host, port)."""

    name: str | None
    address: tuple[str, int] | None
    secret: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A shard's first word. ``can_share``: it could sum through shared memory."""

    rank: int
    secret: str
    can_share: bool


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load your share. ``collective``: "shared memory" (its file came before), "gloo" or "nccl"; these meet at
    ``rendezvous``."""

    args: EngineArgs
    collective: str
    rendezvous: tuple[str, int] | None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A rank's weights are there, and it has room for so many KV blocks."""

    num_blocks: int
    weights_bytes: int


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Take so many KV blocks, as every rank does."""

    num_blocks: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Compute your share of a step."""

    plan: SchedulerOutput


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The shard cannot go on."""

    reason: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """This process is not stopped."""


Message = Hello | Start | Loaded | Allocate | Step | Failed | Beat

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def framed(message: Message) -> bytes:
    """A message as it travels."""
    frame = _ENCODER.encode(message)
    return _HEAD.pack(len(frame)) + frame


_BEAT = framed(Beat())


class Channel:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._received = bytearray()
        self._pending: list[Message] = []
        self.is_local = connection.family == socket.AF_UNIX
        if not self.is_local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """
        Raises:
            OSError: the peer is gone.
        """
        self.send_frame(framed(message))

    def send_frame(self, frame: bytes) -> None:
        """As :meth:`send`, for what goes to several peers."""
        with self._sending:
            self._socket.sendall(frame)

    def beat(self) -> None:
        """Sends a beat unless something else is being sent, which may take as long as the peer hangs."""
        if self._sending.acquire(blocking=False):
            try:
                self._socket.sendall(_BEAT)
            finally:
                self._sending.release()

    def send_file(self, file: int | None) -> None:
        """A file descriptor, or word that there is none; the other end calls :meth:`receive_file`."""
        if file is None:
            self._socket.sendall(b"\0")
        else:
            socket.send_fds(self._socket, [b"\1"], [file])

    def receive_file(self) -> int | None:
        """
        Raises:
            ShardLostError: the peer is gone.
        """
        if not self.is_local:
            word, files = self._socket.recv(1), list[int]()
        else:
            word, files, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not word:
            raise ShardLostError("Rank 0 has hung up.")
        return files[0] if files else None

    def receive(self) -> list[Message] | None:
        """What has come, after waiting for at least a part of something; None: the peer is gone."""
        if self._pending:
            messages, self._pending = self._pending, []
            return messages
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError:
            return None
        if not data:
            return None
        self._received += data
        messages = []
        while len(self._received) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            messages.append(_DECODER.decode(memoryview(self._received)[_HEAD.size : end].tobytes()))
            del self._received[:end]
        return messages

    def first(self) -> Message:
        """The first message, waited for.

        Raises:
            ShardLostError: the peer is gone, or says something else than a message.
        """
        while True:
            try:
                messages = self.receive()
            except msgspec.DecodeError as error:
                raise ShardLostError("A stranger called.") from error
            if messages is None:
                raise ShardLostError("The other end has hung up.")
            if messages:
                self._pending = messages[1:]
                return messages[0]

    def peer_pid(self) -> int | None:
        """The process at the other end of a unix socket; None where this process has no name for it."""
        if not self.is_local or not hasattr(socket, "SO_PEERCRED"):
            return None
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0]) or None

    def hang_up(self) -> None:
        """Ends sending, also where another thread is in the middle of it; the peer sees it and leaves."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Caller:
    """A shard that has said who it is."""

    hello: Hello
    channel: Channel


class Listener:
    """Where the shards of one group call. The unix socket's name is Linux's abstract kind: no file to leave behind."""

    def __init__(self, host: str | None, secret: str) -> None:
        """``host``: the address on which other machines reach this one; None: all shards are here."""
        name, address = None, None
        self._sockets: list[socket.socket] = []
        if sys.platform == "linux":
            name = f"nanoserve-{secrets.token_hex(8)}"
            self._sockets.append(socket.socket(socket.AF_UNIX))
            self._sockets[0].bind("\0" + name)
        if host is not None or name is None:
            self._sockets.append(socket.create_server((host or "127.0.0.1", 0)))
            address = self._sockets[-1].getsockname()[:2]
        for listening in self._sockets:
            listening.listen()
            listening.setblocking(False)
        self.meeting = Meeting(name, address, secret)

    def accept(self) -> Caller | None:
        """A shard that has called by now; None: nobody has. Strangers are turned away."""
        for listening in self._sockets:
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                continue
            connection.settimeout(_GREETING_TIMEOUT_S)
            channel = Channel(connection)
            try:
                hello = channel.first()
            except ShardLostError:
                hello = Failed("")
            if isinstance(hello, Hello) and hmac.compare_digest(hello.secret, self.meeting.secret):
                connection.settimeout(None)
                return Caller(hello, channel)
            channel.close()
        return None

    def close(self) -> None:
        for listening in self._sockets:
            listening.close()


def call(meeting: Meeting) -> Channel:
    """A shard's connection to rank 0.

    Raises:
        OSError: rank 0 does not listen.
    """
    if meeting.name is not None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect("\0" + meeting.name)
            return Channel(connection)
        except ConnectionRefusedError:
            connection.close()
            if meeting.address is None:
                raise
    assert meeting.address is not None, "a meeting has a place"
    return Channel(socket.create_connection(meeting.address))
