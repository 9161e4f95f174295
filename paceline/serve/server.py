"""The server process: starts the engine and the HTTP side, and ends both.

Listens at once and answers 503 until the engine is ready. Ctrl-C and SIGTERM end it: open requests
get an error, the engine process goes, within a few seconds. If the engine dies, all clients are
told and the server exits with status 1: it is not restarted, since whatever ended it (memory,
mostly) would end it again, and a supervisor restarts the whole in a known state.

Knows uvicorn, signals and sockets. Knows nothing of torch: the engine is another process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from paceline.checkpoint import open_checkpoint
from paceline.config import EngineConfig, ServerConfig
from paceline.errors import ConfigError
from paceline.serve.app import create_app
from paceline.serve.chat import ChatTemplate
from paceline.serve.engine_client import ENGINE_COMMAND, EngineClient
from paceline.serve.generation import ServedModel
from paceline.serve.routes import Front
from paceline.serve.speculation import SpeculationInfo
from paceline.serve.startup import StartupDisplay
from paceline.serve.tokenizer import load_tokenizer
from paceline.types import Ready

API_KEY_VARIABLE = "PACELINE_API_KEY"
EXIT_STOPPED, EXIT_ENGINE_DIED = 0, 1
# For streams to write their last event at the end, before their connections are cut.
_GRACE_S = 3


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    engine_command: tuple[str, ...] = ENGINE_COMMAND,
) -> int:
    """Serve until stopped; returns the process's exit code: 0 when stopped, 1 when the engine died.

    Prints one line with the address when ready. engine_command: see `EngineClient`. Raises
    ConfigError (the port is taken), CheckpointError or EngineDied if it cannot start.
    """
    with (
        listen(server_config.host, server_config.port) as listener,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        server = _Server(engine_config, server_config, listener, engine_command)
        return runner.run(server.run())


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError in one line if there cannot be one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host}: no such address ({error})") from None
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            # Of use after a restart: connections of the last run may still be winding down.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(_why_not_listening(host, port, error)) from None
    return listener


def _why_not_listening(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; choose another with --port (0 picks a free one)"
    return f"cannot listen on {host}, port {port}: {error.strerror}"


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: `_Server` has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        listener: socket.socket,
        engine_command: tuple[str, ...],
    ) -> None:
        self._engine_config = engine_config
        self._server_config = server_config
        self._listener = listener
        self._display = StartupDisplay()
        self._engine = EngineClient(
            engine_config, on_progress=self._display.show, command=engine_command
        )
        self._front = Front(
            engine=self._engine,
            model=None,
            max_body=server_config.max_body_mb * 2**20,
            max_queued=server_config.max_queued_requests,
            seed=engine_config.seed,
            api_key=server_config.api_key or os.environ.get(API_KEY_VARIABLE) or None,
            speculation=SpeculationInfo.of(engine_config),
        )
        self._http = _Http(
            uvicorn.Config(
                create_app(self._front),
                log_config=None,
                log_level="error",  # not a line for every malformed request
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._stop = asyncio.Event()

    async def run(self) -> int:
        self._handle_signals()
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        try:
            return await self._until_over(http)
        finally:
            self._display.close()
            self._engine.refuse("the server is shutting down")
            # Whatever is cut off now was told so; uvicorn need not print it.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self._http.should_exit = True
            await asyncio.wait([http])
            await self._engine.stop()

    async def _until_over(self, http: asyncio.Task[None]) -> int:
        stop = asyncio.create_task(self._stop.wait())
        start = asyncio.create_task(self._start())
        try:
            await asyncio.wait([stop, start, http], return_when=asyncio.FIRST_COMPLETED)
            if http.done():
                http.result()
            if not start.done():
                return EXIT_STOPPED
            self._announce(start.result())
            died = asyncio.create_task(self._engine.died())
            await asyncio.wait([stop, died, http], return_when=asyncio.FIRST_COMPLETED)
            if not died.done():
                await _give_up(died)
                return EXIT_STOPPED
            print(f"paceline: {died.result()}; shutting down", file=sys.stderr, flush=True)
            return EXIT_ENGINE_DIED
        finally:
            await _give_up(stop)
            await _give_up(start)

    async def _start(self) -> Ready:
        """Engine and tokenizer at the same time; the first failure counts."""
        engine = asyncio.create_task(self._engine.start())
        text = asyncio.create_task(asyncio.to_thread(load_served_model, self._engine_config))
        try:
            await asyncio.wait([engine, text], return_when=asyncio.FIRST_EXCEPTION)
            # A broken checkpoint ends the engine, too, and is the better explanation.
            if text.done():
                text.result()
            ready = await engine
            model = await text
        finally:
            await _give_up(engine)
            await _give_up(text)
        self._front.model = dataclasses.replace(
            model,
            name=self._server_config.served_model_name or model.name,
            max_model_len=ready.max_model_len,
        )
        return ready

    def _announce(self, ready: Ready) -> None:
        self._display.close()
        model = self._front.serving()
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(
            f"Serving {model.name} on http://{host}:{port} ({ready.description}; context "
            f"{ready.max_model_len:,} tokens, K/V cache {ready.kv_tokens:,} tokens)",
            flush=True,
        )

    def _handle_signals(self) -> None:
        def on_signal() -> None:
            # Asked a second time: do not wait for open connections.
            self._http.force_exit = self._stop.is_set()
            self._stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)


def load_served_model(config: EngineConfig) -> ServedModel:
    """Name, tokenizer and chat template of a checkpoint, with the checkpoint's own context limit.

    Raises CheckpointError. Reads no weights.
    """
    checkpoint = open_checkpoint(config.model, config.load_format)
    tokenizer = load_tokenizer(checkpoint)
    return ServedModel(
        name=checkpoint.name,
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos, eos=tokenizer.eos),
        vocab_size=checkpoint.config.vocab_size,
        max_model_len=checkpoint.config.max_position,
        created=int(time.time()),
    )


async def _give_up(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; its failure, if it had one, is nobody's concern now."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
