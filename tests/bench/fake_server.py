"""A small OpenAI server with scripted answers, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from aiohttp import web

MODEL = "fake-model"


@dataclass(frozen=True)
class Answer:
    """What one request gets. pieces: written one by one.

    breaks: drop the connection after the pieces. dies: stop the whole server instead of answering.
    hangs: never end the stream.
    """

    pieces: tuple[bytes, ...] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    breaks: bool = False
    dies: bool = False
    hangs: bool = False


def event(value: object) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def chat_chunk(content: str, finish_reason: str | None = None) -> bytes:
    return event(
        {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}]}
    )


def usage_chunk(tokens: int, prompt_tokens: int = 7) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}}
    )


def stream(words: Iterable[str], *, usage: int | None = None) -> Answer:
    """A whole chat stream: one chunk a word, the finish, perhaps usage, [DONE]."""
    pieces = [chat_chunk(""), *(chat_chunk(word) for word in words), chat_chunk("", "length")]
    if usage is not None:
        pieces.append(usage_chunk(usage))
    return Answer((*pieces, event("[DONE]")))


def refuse(status: int, message: str) -> Answer:
    body = json.dumps({"error": {"message": message, "type": "x"}}).encode()
    return Answer((body,), status=status, content_type="application/json")


Script = Callable[[int, dict[str, Any]], Answer]


class FakeServer:
    """`with FakeServer(script) as server:` answers request i with `script(i, body)`."""

    def __init__(self, script: Script, *, models: Answer | None = None) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self._script = script
        listed = json.dumps({"object": "list", "data": [{"id": MODEL}, {"id": "other"}]}).encode()
        self._models = models or Answer((listed,), content_type="application/json")
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/{tail:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.05)
        await runner.setup()
        self._site = web.TCPSite(runner, "127.0.0.1", 0)
        await self._site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return await self._write(request, self._models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answer = self._script(len(self.bodies), body)
        self.bodies.append(body)
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._write(request, answer)
        finally:
            self.in_flight -= 1

    async def _write(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        assert request.transport is not None
        response = web.StreamResponse(status=answer.status)
        response.content_type = answer.content_type
        if answer.dies:
            await self._site.stop()
            request.transport.abort()
            return response
        await response.prepare(request)
        for piece in answer.pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        if answer.hangs:
            await self._stop.wait()
        if answer.breaks:
            request.transport.abort()
        return response
