"""From a parsed request to text: encode the prompt, follow the choices, count the usage.

Knows the tokenizer, the chat template, the text assembler and the subscription. Stop strings are
matched on this side: the engine learns of a match by an abort. Knows nothing of HTTP, JSON or
processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from paceline.errors import EngineUnavailable, InvalidRequest, RequestError
from paceline.serve.assembler import TextAssembler
from paceline.serve.chat import ChatTemplate
from paceline.serve.engine import Engine, Subscription
from paceline.serve.metrics import Metrics
from paceline.serve.protocol import ChatRequest, CompletionRequest
from paceline.serve.responses import DraftUsage, Usage
from paceline.serve.tokenizer import Tokenizer
from paceline.types import AddRequest, Delta, FinishReason

# Texts longer than this are encoded in a thread: about a millisecond of work.
LONG_TEXT_CHARS = 4000

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The one model of this server.

    vocab_size: of the model; ids from there on mean nothing. created: Unix seconds.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    vocab_size: int
    max_model_len: int
    created: int


class ClientGone(Exception):
    """The client left before the end; there is nobody to tell."""


async def encode_prompts(model: ServedModel, request: CompletionRequest) -> list[Sequence[int]]:
    """Token ids of each prompt. Raises InvalidRequest."""
    prompts = request.prompts
    for prompt in prompts:
        if not isinstance(prompt, str):
            _check_ids(prompt, model.vocab_size, param="prompt")

    def encode_all() -> list[Sequence[int]]:
        return [
            model.tokenizer.encode(prompt, add_special_tokens=True)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

    characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    ids = await _call(encode_all, characters=characters)
    if not all(ids):
        raise InvalidRequest("prompt must not be empty", param="prompt")
    return ids


async def encode_chat(model: ServedModel, request: ChatRequest) -> list[Sequence[int]]:
    """Token ids of the prompt that the template makes of the messages. Raises InvalidRequest."""

    def encode() -> Sequence[int]:
        text = model.template.render(request.messages)
        # The template writes the special tokens itself.
        return model.tokenizer.encode(text, add_special_tokens=False)

    characters = sum(len(message["content"]) for message in request.messages)
    ids = await _call(encode, characters=characters)
    if not ids:
        raise InvalidRequest("messages make an empty prompt", param="messages")
    return [ids]


def check_stop_token_ids(ids: Sequence[int], vocab_size: int) -> None:
    _check_ids(ids, vocab_size, param="stop_token_ids")


def _check_ids(ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    if any(number < 0 or number >= vocab_size for number in ids):
        raise InvalidRequest(f"{param}: token ids are between 0 and {vocab_size - 1}", param=param)


async def _call(function: Callable[[], _T], *, characters: int) -> _T:
    """In a thread when it is long, so that other streams go on meanwhile."""
    if characters <= LONG_TEXT_CHARS:
        return function()
    return await asyncio.to_thread(function)


class ChoicePiece(NamedTuple):
    """New text of choice `choice`. `finish` is set in its last piece."""

    choice: int
    text: str
    finish: FinishReason | None


class _Choice:
    """One choice while it is generated. last: when its latest delta came."""

    def __init__(self, number: int, assembler: TextAssembler) -> None:
        self.number = number
        self.assembler = assembler
        self.cached_tokens = 0
        self.drafted = 0
        self.accepted = 0
        self.last: float | None = None


class Generation:
    """All choices of one HTTP request, from the first delta to the usage.

    requests: as `expand` made them, n of each prompt. assemblers: one of each request. arrival:
    `time.perf_counter()` when the HTTP request came in.
    """

    def __init__(
        self,
        engine: Engine,
        subscription: Subscription,
        *,
        requests: Sequence[AddRequest],
        assemblers: Sequence[TextAssembler],
        n: int,
        arrival: float,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._subscription = subscription
        self._metrics = metrics
        self._arrival = arrival
        self._prompts = [request.prompt for request in requests[::n]]
        self._n = n
        self._choices = {
            request.id: _Choice(number, assembler)
            for number, (request, assembler) in enumerate(zip(requests, assemblers, strict=True))
        }
        self._unfinished = len(requests)
        self._first_token_seen = False

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    async def take(self) -> list[ChoicePiece]:
        """What came since the last call; waits for something. Call it while not `finished`.

        Raises RequestError when the engine gave a choice up, ClientGone when the client left.
        """
        deltas = await self._subscription.take()
        if not deltas:
            raise ClientGone
        now = time.perf_counter()
        pieces = [self._piece(delta, now) for delta in deltas]
        if self.finished:
            self._metrics.request_seconds.observe(now - self._arrival)
        return pieces

    def usage(self, *, drafts: bool = False) -> Usage:
        """The counts; prompts count once, however many choices they have.

        drafts: count draft tokens, too. A delta that completes a stop string counts as a whole,
        so accepted drafts may include some behind the cut, which completion tokens do not.
        """
        choices = list(self._choices.values())
        counted = DraftUsage(
            drafted_tokens=sum(choice.drafted for choice in choices),
            accepted_tokens=sum(choice.accepted for choice in choices),
        )
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self._prompts),
            completion_tokens=sum(choice.assembler.completion_tokens for choice in choices),
            cached_tokens=sum(choice.cached_tokens for choice in choices[:: self._n]),
            drafts=counted if drafts else None,
        )

    def _piece(self, delta: Delta, now: float) -> ChoicePiece:
        if delta.finish in (FinishReason.ERROR, FinishReason.ABORT):
            raise self._error(delta)
        choice = self._choices[delta.id]
        choice.cached_tokens = max(choice.cached_tokens, delta.cached_tokens)
        choice.drafted += delta.drafted
        choice.accepted += delta.accepted
        self._observe(choice, len(delta.tokens), now)
        text, finish = choice.assembler.feed(delta.tokens, delta.finish)
        if finish is not None:
            self._unfinished -= 1
            if delta.finish is None:
                self._subscription.abandon(delta.id)
        return ChoicePiece(choice.number, text, finish)

    def _observe(self, choice: _Choice, tokens: int, now: float) -> None:
        if not tokens:
            return
        if choice.last is not None:
            self._metrics.inter_token.observe((now - choice.last) / tokens)
        choice.last = now
        if not self._first_token_seen:
            self._first_token_seen = True
            self._metrics.time_to_first_token.observe(now - self._arrival)

    def _error(self, delta: Delta) -> RequestError:
        reason = delta.error or "the engine gave the request up"
        return RequestError(reason) if self._engine.alive else EngineUnavailable(reason)
