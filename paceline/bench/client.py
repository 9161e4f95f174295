"""One streamed request over HTTP, from body to `RequestRecord`. The only module that speaks HTTP.

Knows no levels and no arrivals: the caller says when a request is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec

from paceline.bench.config import BenchConfig
from paceline.bench.protocol import (
    PATHS,
    RequestFailed,
    Transcript,
    first_model,
    http_failure,
    no_stream,
    one_line,
    rejected_field,
    request_body,
)
from paceline.bench.record import RequestRecord
from paceline.bench.sse import Event, EventDecoder
from paceline.bench.workload import Prompt

# Idle connections are dropped before the 5 s after which common servers drop them: no request is
# sent on a connection that the server is about to close.
_KEEPALIVE_S = 4.0
# After [DONE] the rest of the answer is read, so that the connection can serve again; not longer.
_DRAIN_S = 1.0
_MODELS_TIMEOUT_S = 10.0

clock = time.perf_counter


@contextlib.asynccontextmanager
async def open_session(config: BenchConfig) -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP session without limits of its own on connections or time."""
    headers = {"User-Agent": "paceline-bench", "Accept-Encoding": "identity"}
    if config.api_key is not None:
        headers["Authorization"] = f"Bearer {config.api_key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    no_limit = aiohttp.ClientTimeout(total=None, sock_connect=None)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=no_limit
    ) as session:
        yield session


async def find_model(session: aiohttp.ClientSession, config: BenchConfig) -> str:
    """The first of the server's models. Raises RequestFailed."""
    try:
        async with (
            asyncio.timeout(min(_MODELS_TIMEOUT_S, config.timeout)),
            session.get(f"{config.api_base}/models") as response,
        ):
            answer = await response.read()
            if response.status != 200:
                raise http_failure(response.status, answer)
            return first_model(answer)
    except (aiohttp.ClientError, OSError) as exc:
        raise RequestFailed(_reason(exc)) from None


class Client:
    """Sends requests of one configuration; remembers which optional fields the server rejects."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        config: BenchConfig,
        *,
        model: str,
        on_chunk: Callable[[], None],
        on_rejected: Callable[[str], None],
    ) -> None:
        """on_chunk: called at each chunk with text. on_rejected: once for each dropped field."""
        self._session = session
        self._config = config
        self._model = model
        self._on_chunk = on_chunk
        self._on_rejected = on_rejected
        self._rejected: list[str] = []
        self._url = config.api_base + PATHS[config.api]

    async def send(self, index: int, prompt: Prompt, *, due: float) -> RequestRecord:
        """Send one request now and read its stream to the end; failures end up in the record."""
        sent = clock()
        transcript = Transcript()
        try:
            async with asyncio.timeout(self._config.timeout):
                await self._exchange(index, prompt, transcript=transcript)
            failure = transcript.failure()
        except TimeoutError:
            failure = f"no end within {self._config.timeout:g} s"
        except (RequestFailed, aiohttp.ClientError, OSError) as exc:
            failure = _reason(exc)
        end = clock() if transcript.end is None or failure is not None else transcript.end
        return RequestRecord(
            index=index,
            prompt=prompt.id,
            due=due,
            sent=sent,
            first=transcript.first,
            end=end,
            gaps=tuple(transcript.gaps),
            chunks=len(transcript.pieces),
            output_tokens=transcript.output_tokens,
            token_count=transcript.token_count,
            prompt_tokens=transcript.usage.prompt_tokens,
            cached_tokens=transcript.cached_tokens,
            finish_reason=transcript.finish_reason,
            failure=failure,
            text="".join(transcript.pieces),
        )

    async def _exchange(self, index: int, prompt: Prompt, *, transcript: Transcript) -> None:
        """Post, and once more for each optional field that the server rejects by name."""
        while True:
            body = request_body(
                self._config, prompt, model=self._model, index=index, without=self._rejected
            )
            async with self._post(body) as response:
                if response.status == 200:
                    return await self._read(response, transcript)
                answer = await response.read()
            # A field that --extra-body brings cannot be dropped.
            optional = {n: v for n, v in body.items() if n not in self._config.extra_fields()}
            field = rejected_field(response.status, answer, body=optional)
            if field is None:
                raise http_failure(response.status, answer)
            if field not in self._rejected:
                self._rejected.append(field)
                self._on_rejected(field)

    def _post(self, body: dict[str, Any]) -> contextlib.AbstractAsyncContextManager[
        aiohttp.ClientResponse
    ]:  # fmt: skip
        return self._session.post(
            self._url,
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
        )

    async def _read(self, response: aiohttp.ClientResponse, transcript: Transcript) -> None:
        if response.content_type == "application/json":
            raise no_stream(await response.read())
        decoder = EventDecoder()
        async for piece in response.content.iter_any():
            self._take(decoder.feed(piece), transcript)
            if transcript.end is not None:
                return await _drain(response)
        self._take(decoder.close(), transcript)

    def _take(self, events: list[Event], transcript: Transcript) -> None:
        now = clock()
        for event in events:
            chunks = len(transcript.pieces)
            transcript.take(event, now)
            if len(transcript.pieces) > chunks:
                self._on_chunk()


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows [DONE]: nothing, from all but strange servers."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in response.content.iter_any():
                pass


def _reason(exc: Exception) -> str:
    """One line for an exception, the same for each request that fails for the same cause."""
    if isinstance(exc, RequestFailed):
        return str(exc)
    if isinstance(exc, aiohttp.ClientConnectorError):
        where = f"{exc.host}:{exc.port}"
        if isinstance(exc.os_error, ConnectionRefusedError):
            return f"connection refused by {where}"
        return one_line(f"cannot connect to {where}: {exc.os_error}")
    if isinstance(exc, aiohttp.ServerDisconnectedError):
        return "the server closed the connection without an answer"
    if isinstance(exc, aiohttp.ClientPayloadError):
        return "stream ended early: the connection broke"
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return one_line(f"{type(exc).__name__}: {exc}")
