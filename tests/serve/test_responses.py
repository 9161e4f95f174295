"""Response bodies: OpenAI's shapes, and chunks that hold any text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import errors
from paceline.serve.responses import (
    ChunkEncoder,
    DraftUsage,
    FinishedChoice,
    Head,
    Kind,
    Usage,
    error_event,
    openai_error,
    whole_response,
)
from paceline.types import FinishReason

KINDS: tuple[Kind, ...] = ("chat", "completion")
USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)
USAGE_BODY = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def head(kind: Kind) -> Head:
    return Head(kind, "abc", 7, 'a "model"')


def event(data: bytes) -> dict[str, Any]:
    """The one event that `data` is."""
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    body = json.loads(data[6:])
    assert isinstance(body, dict)
    return body


def test_a_whole_chat() -> None:
    body = whole_response(head("chat"), [FinishedChoice(0, "hi", FinishReason.STOP)], USAGE)
    assert json.loads(body) == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 7,
        "model": 'a "model"',
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE_BODY,
    }


def test_a_whole_completion() -> None:
    choices = [FinishedChoice(i, f"t{i}", FinishReason.LENGTH) for i in range(2)]
    body = json.loads(whole_response(head("completion"), choices, USAGE))
    assert (body["id"], body["object"]) == ("cmpl-abc", "text_completion")
    assert body["choices"] == [
        {"index": i, "text": f"t{i}", "logprobs": None, "finish_reason": "length"} for i in range(2)
    ]


def test_draft_counts_are_in_the_usage_that_has_them() -> None:
    usage = USAGE._replace(drafts=DraftUsage(drafted_tokens=9, accepted_tokens=6))
    wanted = {**USAGE_BODY, "speculation": {"drafted_tokens": 9, "accepted_tokens": 6}}
    for kind in KINDS:
        choices = [FinishedChoice(0, "hi", FinishReason.STOP)]
        assert json.loads(whole_response(head(kind), choices, usage))["usage"] == wanted
        chunk = event(ChunkEncoder(head(kind), 1, include_usage=True).usage(usage))
        assert (chunk["choices"], chunk["usage"]) == ([], wanted)


@given(st.text())
def test_text_chunks_hold_any_text(text: str) -> None:
    chat = event(ChunkEncoder(head("chat"), 2, include_usage=True).text(1, text))
    assert chat == {
        "id": "chatcmpl-abc",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": 'a "model"',
        "choices": [
            {"index": 1, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        ],
        "usage": None,
    }
    completion = event(ChunkEncoder(head("completion"), 1, include_usage=False).text(0, text))
    assert completion["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    ]
    assert "usage" not in completion


def test_the_other_chunks() -> None:
    chat = ChunkEncoder(head("chat"), 1, include_usage=True)
    (start,) = event(chat.start(0))["choices"]
    assert start["delta"] == {"role": "assistant", "content": ""}
    (end,) = event(chat.finish(0, FinishReason.STOP))["choices"]
    assert (end["delta"], end["finish_reason"]) == ({}, "stop")
    usage = event(chat.usage(USAGE))
    assert (usage["choices"], usage["usage"]) == ([], USAGE_BODY)
    completion = ChunkEncoder(head("completion"), 1, include_usage=False)
    (end,) = event(completion.finish(0, FinishReason.LENGTH))["choices"]
    assert (end["text"], end["finish_reason"]) == ("", "length")


@pytest.mark.parametrize(
    ("error", "status", "type_", "headers"),
    [
        (errors.InvalidRequest("m", param="p", code="c"), 400, "invalid_request_error", {}),
        (
            errors.Unauthorized("m"),
            401,
            "authentication_error",
            {"www-authenticate": "Bearer"},
        ),
        (errors.ModelNotFound("m"), 404, "invalid_request_error", {}),
        (errors.BodyTooLarge("m"), 413, "invalid_request_error", {"connection": "close"}),
        (errors.QueueFull("m", retry_after=4), 429, "rate_limit_error", {"retry-after": "4"}),
        (errors.RequestError("m"), 500, "server_error", {}),
        (errors.EngineUnavailable("m"), 503, "server_error", {}),
    ],
)
def test_errors(
    error: errors.RequestError, status: int, type_: str, headers: dict[str, str]
) -> None:
    got_status, body, got_headers = openai_error(error)
    assert (got_status, got_headers) == (status, headers)
    expected = {"error": {"message": "m", "type": type_, "param": error.param, "code": error.code}}
    assert json.loads(body) == expected
    assert event(error_event(error)) == expected
