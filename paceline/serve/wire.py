"""The wire between the HTTP process and the engine process: two ZeroMQ sockets, msgpack messages.

The HTTP process binds both ends: a PUSH socket that carries `list[ToEngine]` (one message is one
list) and a PULL socket that receives `FromEngine` (one message each). The engine connects its PULL
and PUSH to them. What the engine needs to start is one `EngineLaunch`, passed as its argument.

Knows message types, addresses and sockets. Does not know what a message causes on either side, nor
asyncio, HTTP or torch.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import zmq

from paceline.config import EngineConfig
from paceline.types import FromEngine, ToEngine

# How long a closing socket may go on delivering what it holds (the engine's last `Failed`).
LINGER_MS = 1000


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process is started with.

    to_engine: address the engine's PULL socket connects to. from_engine: the same for its PUSH.
    parent_pid: the HTTP process; when it is gone (see `parent_gone`), the engine must end.
    """

    config: EngineConfig
    to_engine: str
    from_engine: str
    parent_pid: int


_launch_encoder = msgspec.json.Encoder()
_launch_decoder = msgspec.json.Decoder(EngineLaunch)
_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder: msgspec.msgpack.Decoder[list[ToEngine]] = msgspec.msgpack.Decoder(
    list[ToEngine]
)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode_launch(launch: EngineLaunch) -> str:
    """One line of JSON for the engine's command line."""
    return _launch_encoder.encode(launch).decode()


def decode_launch(line: str) -> EngineLaunch:
    return _launch_decoder.decode(line)


def encode_to_engine(messages: Sequence[ToEngine]) -> bytes:
    return _encoder.encode(messages)


def decode_to_engine(frame: bytes) -> list[ToEngine]:
    return _to_engine_decoder.decode(frame)


def encode_from_engine(message: FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_from_engine(frame: bytes) -> FromEngine:
    return _from_engine_decoder.decode(frame)


def parent_gone(parent_pid: int) -> bool:
    """Whether the process that started this one has ended, by SIGKILL too (it is re-parented)."""
    return os.getppid() != parent_pid


class EngineSide:
    """The engine's two sockets. Sending never blocks: the HTTP process always reads.

    Not thread-safe; use as a context manager or call `close`.
    """

    def __init__(self, launch: EngineLaunch) -> None:
        self._parent_pid = launch.parent_pid
        self._context = zmq.Context()
        self._pull = _socket(self._context, zmq.PULL)
        self._push = _socket(self._context, zmq.PUSH)
        self._pull.connect(launch.to_engine)
        self._push.connect(launch.from_engine)

    def receive(self, *, wait_ms: int) -> list[ToEngine]:
        """All messages that have arrived, in order; waits up to `wait_ms` for the first."""
        messages: list[ToEngine] = []
        if wait_ms > 0 and not self._pull.poll(wait_ms):
            return messages
        while True:
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.extend(decode_to_engine(frame))

    def send(self, message: FromEngine) -> None:
        self._push.send(encode_from_engine(message), zmq.NOBLOCK)

    def parent_gone(self) -> bool:
        """Whether the HTTP process has ended; ask at least twice a second and exit if so."""
        return parent_gone(self._parent_pid)

    def close(self) -> None:
        """Closes both sockets, after delivering what was sent (for up to `LINGER_MS`)."""
        self._pull.close(linger=0)
        self._push.close(linger=LINGER_MS)
        self._context.term()

    def __enter__(self) -> EngineSide:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class FrontSide:
    """The HTTP process's two bound sockets: create it first, then start the engine with `launch`.

    `fileno()` becomes readable (edge-triggered, as ZeroMQ defines it) when messages may have
    arrived; `receive()` takes all that are there. Neither `send` nor `receive` ever blocks.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._push = _socket(self._context, zmq.PUSH)
        self._pull = _socket(self._context, zmq.PULL)
        # mkdtemp makes it 0700: nobody else can reach the sockets in it.
        self._directory = tempfile.TemporaryDirectory(
            prefix="paceline-", ignore_cleanup_errors=True
        )
        self._to_engine = self._bind(self._push, "to")
        self._from_engine = self._bind(self._pull, "from")

    def _bind(self, socket: zmq.Socket[bytes], name: str) -> str:
        """Binds to an ipc path, or to a free loopback port where ipc is lacking or too long."""
        if zmq.has("ipc"):
            address = f"ipc://{Path(self._directory.name) / name}"
            try:
                socket.bind(address)
                return address
            except zmq.ZMQError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        return f"tcp://127.0.0.1:{port}"

    def launch(self, config: EngineConfig) -> EngineLaunch:
        return EngineLaunch(
            config=config,
            to_engine=self._to_engine,
            from_engine=self._from_engine,
            parent_pid=os.getpid(),
        )

    def fileno(self) -> int:
        return int(self._pull.getsockopt(zmq.FD))

    def send(self, messages: Sequence[ToEngine]) -> bool:
        """Queues one message for the engine. False: no engine is connected, nothing was sent."""
        try:
            self._push.send(encode_to_engine(messages), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[FromEngine]:
        """All messages that have arrived, in order."""
        messages: list[FromEngine] = []
        while True:
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(decode_from_engine(frame))

    def close(self) -> None:
        self._push.close(linger=0)
        self._pull.close(linger=0)
        self._context.term()
        self._directory.cleanup()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket without a high-water mark: queues are bounded by requests, not by dropping them."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    return socket
