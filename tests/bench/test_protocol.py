from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.bench.config import BenchConfig
from paceline.bench.protocol import (
    RequestFailed,
    Transcript,
    first_model,
    http_failure,
    one_line,
    rejected_field,
    request_body,
)
from paceline.bench.sse import Event
from paceline.bench.workload import Prompt

PROMPT = Prompt(id="p", kind="k", text="hi", messages=({"role": "user", "content": "hi"},))


def body_of(config: BenchConfig, *, index: int = 0, without: tuple[str, ...] = ()) -> Any:
    return request_body(config, PROMPT, model="m", index=index, without=without)


def message(value: object) -> Event:
    return Event("message", value if isinstance(value, str) else json.dumps(value))


def delta(content: str | None, finish: str | None = None) -> Event:
    return message({"choices": [{"delta": {"content": content}, "finish_reason": finish}]})


def test_chat_body() -> None:
    assert body_of(BenchConfig(max_tokens=9)) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_completions_body_has_a_prompt() -> None:
    body = body_of(BenchConfig(api="completions"))
    assert body["prompt"] == "hi"
    assert "messages" not in body


def test_a_seed_is_sent_where_something_is_drawn() -> None:
    assert "seed" not in body_of(BenchConfig(seed=3), index=2)
    assert body_of(BenchConfig(seed=3, temperature=0.5), index=2)["seed"] == 5


def test_optional_fields_can_be_left_out_and_extra_body_wins() -> None:
    assert "ignore_eos" not in body_of(BenchConfig(ignore_eos=False))
    body = body_of(
        BenchConfig(extra_body='{"max_tokens": 2, "top_k": 1}'),
        without=("ignore_eos", "stream_options"),
    )
    assert "ignore_eos" not in body
    assert "stream_options" not in body
    assert (body["max_tokens"], body["top_k"]) == (2, 1)


def test_a_rejected_field_is_one_that_was_sent_and_named() -> None:
    body = {"ignore_eos": True, "stream_options": {}}
    assert rejected_field(400, b"unknown field: ignore_eos", body=body) == "ignore_eos"
    assert rejected_field(422, b"no stream_options here", body=body) == "stream_options"
    assert rejected_field(400, b"bad model", body=body) is None
    assert rejected_field(500, b"ignore_eos", body=body) is None
    assert rejected_field(400, b"ignore_eos", body={}) is None


def test_a_transcript_of_a_good_stream() -> None:
    said = Transcript()
    events = [delta(""), delta("a"), delta("bc"), delta(None, "length")]
    for now, event in enumerate(events):
        said.take(event, float(now))
    assert said.token_count == "chunks"
    assert said.output_tokens == 2
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": None}
    said.take(message({"choices": [], "usage": usage}), 4.0)
    said.take(message("[DONE]"), 5.0)
    assert said.failure() is None
    assert (said.first, said.end, said.gaps, said.pieces) == (1.0, 5.0, [1.0], ["a", "bc"])
    assert (said.output_tokens, said.token_count) == (3, "usage")
    assert said.finish_reason == "length"
    assert said.cached_tokens is None


def test_cached_tokens_are_taken_from_usage() -> None:
    said = Transcript()
    details = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    said.take(message({"usage": details}), 0.0)
    assert said.cached_tokens == 2


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "x"},
        {"delta": {"content": "x"}},
        {"delta": {"content": None, "reasoning_content": "x"}},
        {"delta": {"reasoning": "x"}},
    ],
)
def test_text_in_every_place_counts(choice: dict[str, Any]) -> None:
    said = Transcript()
    said.take(message({"choices": [choice]}), 0.0)
    assert said.pieces == ["x"]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (message({"error": {"message": "out of memory"}}), "error in the stream: out of memory"),
        (message({"error": "plain"}), "error in the stream: plain"),
        (message({"error": {"code": 5}}), 'error in the stream: {"code":5}'),
        (message({"object": "error", "message": "old style"}), "error in the stream: old style"),
        (Event("error", '{"message": "named"}'), "error in the stream: named"),
        (Event("error", "text"), "error in the stream: text"),
        (message("{"), "unreadable event"),
        (message({"choices": 3}), "unreadable event"),
    ],
)
def test_an_error_event_fails_the_request(event: Event, reason: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        Transcript().take(event, 0.0)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], "ended early"),
        ([delta("a")], "ended early"),
        ([delta("a"), delta(None, "error")], "finished with reason 'error'"),
        ([delta("a"), delta(None, "abort"), message("[DONE]")], "finished with reason 'abort'"),
        ([delta(None, "stop"), message("[DONE]")], "without any output"),
    ],
)
def test_a_stream_without_a_good_end_is_a_failure(events: list[Event], reason: str) -> None:
    said = Transcript()
    for event in events:
        said.take(event, 0.0)
    assert reason in (said.failure() or "")


@pytest.mark.parametrize("end", [delta(None, "stop"), message("[DONE]")])
def test_one_sign_of_the_end_is_enough(end: Event) -> None:
    said = Transcript()
    said.take(delta("a"), 0.0)
    said.take(end, 1.0)
    assert said.failure() is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"error": {"message": "too long"}}', "HTTP 400: too long"),
        (b'{"detail": "nope"}', "HTTP 400: nope"),
        (b"<h1>Bad\n gateway</h1>", "HTTP 400: <h1>Bad gateway</h1>"),
        (b"[1]", "HTTP 400: [1]"),
        (b"", "HTTP 400: no message"),
    ],
)
def test_http_failures_say_what_the_server_said(answer: bytes, reason: str) -> None:
    assert str(http_failure(400, answer)) == reason


def test_text_of_a_server_becomes_one_short_printable_line() -> None:
    assert one_line(" a\n\tb\x1b[31m ") == "a b[31m"
    assert len(one_line("x" * 500)) == 200


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"data": []}', b'{"data": [{"id": 3}]}'])
def test_an_answer_without_models(answer: bytes) -> None:
    with pytest.raises(RequestFailed, match="no model"):
        first_model(answer)
