"""POST /v1/completions and /v1/chat/completions: one HTTP request from body to last byte.

Plain ASGI. Whatever goes wrong before the first text is an HTTP error in OpenAI's form; after it,
the stream carries one event `data: {"error": ...}` and ends without `[DONE]`. A client that leaves
is noticed at once, also when no text flows, and its engine requests are aborted. Knows nothing of
processes and sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from paceline.errors import (
    BodyTooLarge,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestError,
)
from paceline.serve.asgi import (
    HungUp,
    read_body,
    refuse_body,
    response_start,
    send_error,
    send_whole,
    until_hung_up,
)
from paceline.serve.assembler import TextAssembler
from paceline.serve.engine import Engine, Subscription
from paceline.serve.expand import expand
from paceline.serve.generation import (
    ChoicePiece,
    ClientGone,
    Generation,
    ServedModel,
    check_stop_token_ids,
    encode_chat,
    encode_prompts,
)
from paceline.serve.metrics import Metrics
from paceline.serve.protocol import Options, parse_chat, parse_completion
from paceline.serve.responses import (
    DONE,
    ChunkEncoder,
    FinishedChoice,
    Head,
    Kind,
    error_event,
    whole_response,
)
from paceline.serve.speculation import SpeculationInfo
from paceline.types import AddRequest, FinishReason

CLIENT_LEFT = 499
RETRY_AFTER_S = 1
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Front:
    """What the routes share.

    model: None until the engine is ready. max_queued: choices in the server at most. seed: of the
    seeds drawn for requests that bring none. api_key: None lets everybody in. speculation: how the
    engine was configured.
    """

    engine: Engine
    model: ServedModel | None
    max_body: int
    max_queued: int
    seed: int = 0
    api_key: str | None = None
    speculation: SpeculationInfo = field(default_factory=SpeculationInfo)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.engine.stats)
        self._seeds = random.Random(self.seed)

    def draw_seed(self) -> int:
        return self._seeds.getrandbits(63)

    def serving(self) -> ServedModel:
        """The model, if requests can be served now. Raises EngineUnavailable."""
        if self.model is None:
            raise EngineUnavailable("the engine is starting", code="engine_starting")
        if not self.engine.alive:
            raise EngineUnavailable("the engine is not running", code="engine_dead")
        return self.model


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A request that is ready for the engine."""

    head: Head
    options: Options
    requests: Sequence[AddRequest]
    assemblers: Sequence[TextAssembler]


class TextEndpoint:
    """One of the two routes that generate text, as an ASGI application."""

    def __init__(self, front: Front, kind: Kind) -> None:
        self._front = front
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500
        try:
            status = await self._respond(scope, receive, send)
        except BodyTooLarge as error:
            status = error.status
            await refuse_body(receive, send, error)
        except RequestError as error:
            status = error.status
            await send_error(send, error)
        except (ClientGone, HungUp):
            status = CLIENT_LEFT
            self._front.metrics.aborts.inc()
        finally:
            self._front.metrics.count(status)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status to count. Raises RequestError while nothing has been sent."""
        arrival = time.perf_counter()
        front = self._front
        body = await read_body(scope, receive, limit=front.max_body)
        self._admit(1)  # before the work of encoding
        job = await self._job(body, request_id=scope["state"]["request_id"])
        self._admit(len(job.requests))
        subscription = front.engine.submit(job.requests)
        with contextlib.closing(subscription):
            generation = Generation(
                front.engine,
                subscription,
                requests=job.requests,
                assemblers=job.assemblers,
                n=job.options.n,
                arrival=arrival,
                metrics=front.metrics,
            )
            watch = asyncio.create_task(_close_when_hung_up(receive, subscription))
            try:
                if job.options.stream:
                    return await _stream(send, generation, job)
                return await _collect(send, generation, job)
            finally:
                watch.cancel()

    async def _job(self, body: bytes, *, request_id: str) -> _Job:
        """Parse, check against the model, encode. Raises RequestError."""
        model = self._front.serving()
        if self._kind == "chat":
            chat = parse_chat(body)
            options = chat.options
            _check_model(options, model)
            prompts = await encode_chat(model, chat)
        else:
            completion = parse_completion(body)
            options = completion.options
            _check_model(options, model)
            self._check_batch(len(completion.prompts) * options.n)
            prompts = await encode_prompts(model, completion)
        requests = expand(
            prompts,
            options.params,
            n=options.n,
            request_id=request_id,
            max_model_len=model.max_model_len,
            draw_seed=self._front.draw_seed,
            param="messages" if self._kind == "chat" else "prompt",
        )
        head = Head(self._kind, request_id, int(time.time()), model.name)
        return _Job(
            head=head,
            options=options,
            requests=requests,
            assemblers=[self._assembler(model, request) for request in requests],
        )

    def _assembler(self, model: ServedModel, request: AddRequest) -> TextAssembler:
        """A completion goes on with the prompt's text; an answer in a chat begins a new one."""
        return TextAssembler(
            model.tokenizer,
            stop=request.params.stop,
            after=() if self._kind == "chat" else request.prompt,
        )

    def _check_batch(self, choices: int) -> None:
        if choices > self._front.max_queued:
            raise InvalidRequest(
                f"{choices} choices in one request are more than this server's limit of "
                f"{self._front.max_queued}",
                param="prompt",
            )

    def _admit(self, choices: int) -> None:
        """One more request, unless the server is full. Raises QueueFull."""
        waiting = self._front.engine.open_requests
        if waiting and waiting + choices > self._front.max_queued:
            raise QueueFull(
                f"the server is full ({waiting} requests); try again later",
                retry_after=RETRY_AFTER_S,
            )


def _check_model(options: Options, model: ServedModel) -> None:
    if options.model != model.name:
        raise ModelNotFound(
            f"the model {options.model!r} does not exist here; this server has {model.name!r}",
            param="model",
            code="model_not_found",
        )
    check_stop_token_ids(options.params.stop_token_ids, model.vocab_size)


async def _close_when_hung_up(receive: Receive, subscription: Subscription) -> None:
    await until_hung_up(receive)
    subscription.close()


async def _collect(send: Send, generation: Generation, job: _Job) -> int:
    texts: list[list[str]] = [[] for _ in job.requests]
    ends = [FinishReason.LENGTH for _ in job.requests]
    while not generation.finished:
        for number, text, finish in await generation.take():
            texts[number].append(text)
            if finish is not None:
                ends[number] = finish
    choices = [
        FinishedChoice(number, "".join(text), end)
        for number, (text, end) in enumerate(zip(texts, ends, strict=True))
    ]
    usage = generation.usage(drafts=job.options.include_draft_usage)
    await send_whole(send, 200, body=whole_response(job.head, choices, usage))
    return 200


async def _stream(send: Send, generation: Generation, job: _Job) -> int:
    """Events as text comes. Headers wait for the first, so that an early error has its status."""
    include_usage = job.options.include_usage
    chunks = ChunkEncoder(job.head, len(job.requests), include_usage=include_usage)
    events = _Events(chunks, starts=job.head.kind == "chat")
    pieces = await generation.take()
    await send(response_start(200, _STREAM_HEADERS))
    try:
        while not generation.finished:
            body = events.encode(pieces)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            pieces = await generation.take()
        usage = generation.usage(drafts=job.options.include_draft_usage)
        counts = chunks.usage(usage) if include_usage else b""
        last, status = events.encode(pieces) + counts + DONE, 200
    except RequestError as error:
        last, status = error_event(error), error.status
    except ClientGone:
        raise
    except Exception:
        logger.exception("a stream failed")
        last, status = error_event(RequestError("internal error")), 500
    await send({"type": "http.response.body", "body": last})
    return status


class _Events:
    """Pieces to events; remembers which choices have begun (chats open each with its role)."""

    def __init__(self, chunks: ChunkEncoder, *, starts: bool) -> None:
        self._chunks = chunks
        self._starts = starts
        self._begun: set[int] = set()

    def encode(self, pieces: Sequence[ChoicePiece]) -> bytes:
        events: list[bytes] = []
        for number, text, finish in pieces:
            if self._starts and number not in self._begun and (text or finish is not None):
                self._begun.add(number)
                events.append(self._chunks.start(number))
            if text:
                events.append(self._chunks.text(number, text))
            if finish is not None:
                events.append(self._chunks.finish(number, finish))
        return b"".join(events)
