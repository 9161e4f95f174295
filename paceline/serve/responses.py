"""OpenAI's response bodies: whole ones, stream chunks, usage, models and errors, as bytes.

A stream's chunks differ only in their text, so the constant part of each is encoded once a stream.
Knows nothing of HTTP libraries, engines or tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from paceline.errors import QueueFull, RequestError
from paceline.types import FinishReason

Kind: TypeAlias = Literal["completion", "chat"]

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class DraftUsage(NamedTuple):
    """Draft tokens verified for one HTTP request, over all its choices, and those accepted."""

    drafted_tokens: int
    accepted_tokens: int


class Usage(NamedTuple):
    """Token counts of one HTTP request, over all its prompts and choices.

    drafts: None unless the client asked for them.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafts: DraftUsage | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.drafts is not None:
            body["speculation"] = self.drafts._asdict()
        return body


class Head(NamedTuple):
    """What all bodies of one response share. created: Unix seconds."""

    kind: Kind
    request_id: str
    created: int
    model: str

    def fields(self, chat_object: str) -> dict[str, Any]:
        chat = self.kind == "chat"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.request_id}",
            "object": chat_object if chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }


@dataclass(frozen=True)
class FinishedChoice:
    """One choice of a response that is not a stream."""

    index: int
    text: str
    finish: FinishReason


def whole_response(head: Head, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
    """The body of a request that did not ask for a stream."""
    bodies: list[dict[str, Any]] = []
    for choice in choices:
        said: dict[str, Any] = {"text": choice.text}
        if head.kind == "chat":
            said = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        end = {"logprobs": None, "finish_reason": choice.finish.value}
        bodies.append({"index": choice.index, **said, **end})
    return _encode({**head.fields("chat.completion"), "choices": bodies, "usage": usage.body()})


class ChunkEncoder:
    """Server-sent events of one stream, each a whole `data:` line with its blank line."""

    def __init__(self, head: Head, choices: int, *, include_usage: bool) -> None:
        self._fields = _encode(head.fields("chat.completion.chunk"))[:-1]
        self._chat = head.kind == "chat"
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._before = [self._prefix(index) for index in range(choices)]
        self._after = (
            (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null}]' + self._tail
        )

    def _prefix(self, index: int) -> bytes:
        """All of a text chunk up to its text."""
        opening = b'data: %b,"choices":[{"index":%d,' % (self._fields, index)
        return opening + (b'"delta":{"content":' if self._chat else b'"text":')

    def start(self, index: int) -> bytes:
        """What comes before a choice's first text: the role, in chats."""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def text(self, index: int, text: str) -> bytes:
        return self._before[index] + _encode(text) + self._after

    def finish(self, index: int, reason: FinishReason) -> bytes:
        said: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._event(index, said, reason)

    def usage(self, usage: Usage) -> bytes:
        return b'data: %b,"choices":[],"usage":%b}\n\n' % (self._fields, _encode(usage.body()))

    def _event(self, index: int, said: dict[str, Any], reason: FinishReason | None) -> bytes:
        choice = {
            "index": index,
            **said,
            "logprobs": None,
            "finish_reason": None if reason is None else reason.value,
        }
        return b'data: %b,"choices":[%b]%b' % (self._fields, _encode(choice), self._tail)


def error_event(error: RequestError) -> bytes:
    """An error in the middle of a stream; the stream ends after it, without `[DONE]`."""
    return b"data: %b\n\n" % error_body(error)


def error_body(error: RequestError) -> bytes:
    return _encode(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def openai_error(error: RequestError) -> tuple[int, bytes, dict[str, str]]:
    """HTTP status, body and extra headers for an error."""
    headers: dict[str, str] = {}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 413:
        headers["connection"] = "close"
    return error.status, error_body(error), headers


def model_body(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "paceline",
        "max_model_len": max_model_len,
    }


def model_list(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(models)}
