"""The HTTP process's end of the engine: starts its process, talks to it, notices its death.

Knows the wire and the life of the process. Every open request gets an error delta as soon as the
process is gone. Nothing here blocks the event loop: sends go to an unbounded ZeroMQ queue, reads
happen when the socket's descriptor says so. Knows nothing of HTTP or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence

from paceline.config import EngineConfig
from paceline.errors import EngineDied, EngineUnavailable
from paceline.serve.engine import Exchange, Subscription
from paceline.serve.wire import FrontSide, encode_launch
from paceline.types import (
    AbortRequests,
    AddRequest,
    EngineStats,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Shutdown,
    StepOutputs,
    ToEngine,
)

ENGINE_COMMAND = (sys.executable, "-m", "paceline.serve.engine_process")
# How long the last messages of an ended process may take through ZeroMQ's own thread.
_LAST_WORDS_S = 0.2


class EngineClient:
    """An `Engine` in a process of its own.

    config: passed to the engine. on_progress: called on the event loop for each stage of start-up.
    command: what to run instead of the engine; the encoded `EngineLaunch` is appended (for tests).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._command = tuple(command)
        self._exchange = Exchange(self._send_abort)
        self._front: FrontSide | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._dead = asyncio.Event()
        self._serving = False
        self._stopping = False
        self._failure: str | None = None
        self.stats = EngineStats()

    @property
    def alive(self) -> bool:
        return self._serving and not self._stopping and not self._dead.is_set()

    @property
    def open_requests(self) -> int:
        return len(self._exchange)

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once it was started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> Ready:
        """Start the process and wait until it serves. Raises EngineDied with its reason if not.

        Call `stop` in the end, also when this raised or was cancelled.
        """
        loop = asyncio.get_running_loop()
        self._front = FrontSide()
        self._ready = loop.create_future()
        loop.add_reader(self._front.fileno(), self._read)
        launch = encode_launch(self._front.launch(self._config))
        # A session of its own: Ctrl-C in a terminal reaches this process alone, which then ends it.
        self._process = await asyncio.create_subprocess_exec(
            *self._command, launch, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        self._watch = asyncio.create_task(self._watch_process(self._process))
        # An edge of the descriptor may have come before the reader was added.
        loop.call_soon(self._read)
        ready = await self._ready
        self._serving = True
        return ready

    def submit(self, requests: Sequence[AddRequest]) -> Subscription:
        if not self.alive:
            raise EngineUnavailable(self._failure or "the engine is not running")
        subscription = self._exchange.open([request.id for request in requests])
        self._send(list(requests))
        return subscription

    async def died(self) -> str:
        """Wait until the engine is dead; returns why, as one line."""
        await self._dead.wait()
        assert self._failure is not None
        return self._failure

    def refuse(self, message: str) -> None:
        """Take no more requests and end the open ones with an error: the server is closing."""
        self._stopping = True
        if self._failure is None:
            self._failure = message
        self._exchange.fail_all(message)

    async def stop(self, *, grace_s: float = 3.0) -> None:
        """End the process: asked first, after `grace_s` made to. Safe to call in any state."""
        self.refuse("the server is shutting down")
        if self._process is not None:
            self._send([Shutdown()])
            await _end(self._process, grace_s=grace_s)
        if self._watch is not None:
            await self._watch
        if self._front is not None:
            asyncio.get_running_loop().remove_reader(self._front.fileno())
            self._front.close()
            self._front = None

    def _send(self, messages: Sequence[ToEngine]) -> None:
        if self._front is not None and not self._dead.is_set():
            # False means that no engine is connected any more: the death watch tells the readers.
            self._front.send(messages)

    def _send_abort(self, ids: Sequence[str]) -> None:
        self._send([AbortRequests(ids=tuple(ids))])

    def _read(self) -> None:
        if self._front is not None:
            for message in self._front.receive():
                self._handle(message)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                self.stats = message.stats
                for delta in message.deltas:
                    self._exchange.deliver(delta)
            case Progress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case Failed():
                self._die(message.message)

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._read()
        if not self._dead.is_set() and not self._stopping:
            await asyncio.sleep(_LAST_WORDS_S)
            self._read()
        self._die(f"the engine process {_how_it_ended(code)}")

    def _die(self, reason: str) -> None:
        """The engine is gone or about to go. The first reason is the one that counts."""
        if self._dead.is_set():
            return
        if self._failure is None:
            self._failure = reason
        self._dead.set()
        self._exchange.fail_all(self._failure)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineDied(self._failure))


async def _end(process: asyncio.subprocess.Process, *, grace_s: float) -> None:
    """Wait for a process that was asked to end; then SIGTERM; then SIGKILL."""
    for patience, push in ((grace_s, process.terminate), (1.0, process.kill)):
        try:
            await asyncio.wait_for(process.wait(), patience)
            return
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                push()
    await process.wait()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
