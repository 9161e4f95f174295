"""The OpenAI API as far as a load generator needs it: bodies out, stream events and errors in.

Pure: knows no HTTP library and no clock (moments are arguments).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from paceline.bench.config import BenchConfig
from paceline.bench.record import TokenCount
from paceline.bench.sse import Event
from paceline.bench.workload import Prompt

PATHS = {"chat": "/chat/completions", "completions": "/completions"}

# Fields a server may not know: dropped when it rejects a request and names one of them.
OPTIONAL_FIELDS = ("ignore_eos", "stream_options")

# A stream that ends for one of these reasons did not give what was asked for.
BAD_FINISH = ("abort", "error")

_REASON_CHARS = 200


class RequestFailed(Exception):
    """A request did not succeed. The message is one line, the same for failures of one cause."""


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The new text: a completion's, a chat answer's, or a reasoning model's thoughts."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream, or an error in one of the shapes that servers use for it."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None
    detail: Any = None


class ModelCard(msgspec.Struct, frozen=True):
    id: str


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]


def request_body(
    config: BenchConfig, prompt: Prompt, *, model: str, index: int, without: Collection[str]
) -> dict[str, Any]:
    """The body of one request, less the optional fields in `without`; `extra_body` goes on top.

    A seed is sent only where something is drawn: above temperature 0, `config.seed + index`.
    """
    body: dict[str, Any] = {"model": model}
    if config.api == "chat":
        body["messages"] = list(prompt.messages)
    else:
        body["prompt"] = prompt.text
    body |= {"max_tokens": config.max_tokens, "temperature": config.temperature}
    if config.temperature > 0:
        body["seed"] = config.seed + index
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if config.ignore_eos:
        body["ignore_eos"] = True
    body = {name: value for name, value in body.items() if name not in without}
    return body | config.extra_fields()


def rejected_field(status: int, answer: bytes, *, body: dict[str, Any]) -> str | None:
    """The optional field of `body` that a 400 or 422 names, if it names one."""
    if status not in (400, 422):
        return None
    text = answer.decode("utf-8", "replace")
    return next((name for name in OPTIONAL_FIELDS if name in body and name in text), None)


def first_model(answer: bytes) -> str:
    """The first model of a `/v1/models` answer. Raises RequestFailed if there is none."""
    try:
        return msgspec.json.decode(answer, type=ModelList).data[0].id
    except (msgspec.DecodeError, IndexError):
        raise RequestFailed("no model in the answer") from None


def http_failure(status: int, answer: bytes) -> RequestFailed:
    """The failure of a request that was not answered with 200."""
    return RequestFailed(f"HTTP {status}: {_error_text(answer) or 'no message'}")


def no_stream(answer: bytes) -> RequestFailed:
    """The failure of a request that was answered with 200 and plain JSON."""
    return RequestFailed(f"HTTP 200 without a stream: {_error_text(answer) or 'no message'}")


def one_line(text: str) -> str:
    """`text` from a server as one printable line of at most 200 characters."""
    line = "".join(char for char in " ".join(text.split()) if char.isprintable())
    return line if len(line) <= _REASON_CHARS else line[: _REASON_CHARS - 1] + "…"


class Transcript:
    """What one stream has said so far. `take` each event at its moment, then ask `failure`."""

    def __init__(self) -> None:
        self.first: float | None = None  # moment of the first chunk with text
        self.end: float | None = None  # moment of [DONE]
        self.gaps: list[float] = []
        self.pieces: list[str] = []
        self.usage = Usage()
        self.finish_reason: str | None = None
        self._last = 0.0  # moment of the latest chunk with text; valid if `first` is set

    def take(self, event: Event, now: float) -> None:
        """Raises RequestFailed if the event is an error or makes no sense."""
        if event.data.strip() == "[DONE]":
            self.end = now
            return
        if event.name == "error":
            raise _stream_error(_error_text(event.data.encode()))
        try:
            chunk = msgspec.json.decode(event.data, type=Chunk)
        except msgspec.DecodeError as exc:
            raise RequestFailed(one_line(f"unreadable event in the stream: {exc}")) from None
        if chunk.error or chunk.object == "error":
            raise _stream_error(_message(chunk))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices or ():
            if choice.content:
                self._text(choice.content, now)
            self.finish_reason = choice.finish_reason or self.finish_reason

    @property
    def output_tokens(self) -> int:
        return self.usage.completion_tokens or len(self.pieces)

    @property
    def token_count(self) -> TokenCount:
        return "usage" if self.usage.completion_tokens else "chunks"

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    def failure(self) -> str | None:
        """Why a stream that has ended is no success, or None."""
        if self.end is None and self.finish_reason is None:
            return "stream ended early: neither finish_reason nor [DONE]"
        if self.finish_reason in BAD_FINISH:
            return f"finished with reason {self.finish_reason!r}"
        if not self.output_tokens:
            return "finished without any output"
        return None

    def _text(self, text: str, now: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self._last)
        self._last = now
        self.pieces.append(text)


def _stream_error(message: str) -> RequestFailed:
    return RequestFailed(f"error in the stream: {message or 'no message'}")


def _error_text(answer: bytes) -> str:
    """The message of an error body, whatever its shape; the body itself if it has none known."""
    try:
        message = _message(msgspec.json.decode(answer, type=Chunk))
    except msgspec.DecodeError:
        message = ""
    return message or one_line(answer.decode("utf-8", "replace"))


def _message(chunk: Chunk) -> str:
    error = chunk.error or chunk.message or chunk.detail or ""
    if isinstance(error, dict):
        error = error.get("message") or error
    return one_line(error if isinstance(error, str) else msgspec.json.encode(error).decode())
