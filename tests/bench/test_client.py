from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from paceline.bench.client import Client, find_model, open_session
from paceline.bench.config import BenchConfig
from paceline.bench.protocol import RequestFailed
from paceline.bench.record import RequestRecord
from paceline.bench.workload import load_prompts

from .fake_server import (
    MODEL,
    Answer,
    FakeServer,
    Script,
    chat_chunk,
    event,
    refuse,
    stream,
    usage_chunk,
)

PROMPT = load_prompts(None, "chat")[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config_for(url: str, **values: Any) -> BenchConfig:
    return BenchConfig(server_url=url, **values)


async def send(config: BenchConfig, *, rejected: list[str] | None = None) -> RequestRecord:
    names = [] if rejected is None else rejected
    async with open_session(config) as session:
        client = Client(session, config, model="m", on_chunk=lambda: None, on_rejected=names.append)
        return await client.send(0, PROMPT, due=0.0)


def record_of(script: Script, **values: Any) -> RequestRecord:
    with FakeServer(script) as server:
        return asyncio.run(send(config_for(server.url, **values)))


def test_a_good_stream_counted_by_usage() -> None:
    record = record_of(lambda i, body: stream(["Hel", "lo"], usage=5))
    assert record.failure is None
    assert (record.text, record.chunks, record.output_tokens) == ("Hello", 2, 5)
    assert (record.token_count, record.prompt_tokens) == ("usage", 7)
    assert record.finish_reason == "length"
    assert record.first is not None
    assert record.sent <= record.first <= record.end
    assert len(record.gaps) == 1


def test_without_usage_chunks_are_counted() -> None:
    record = record_of(lambda i, body: stream(["a", "b", "c"]))
    assert (record.output_tokens, record.token_count) == (3, "chunks")


def test_the_completions_api() -> None:
    pieces = (
        event({"choices": [{"text": "x", "finish_reason": None}]}),
        event({"choices": [{"text": "", "finish_reason": "length"}]}),
        event("[DONE]"),
    )
    with FakeServer(lambda i, body: Answer(pieces)) as server:
        record = asyncio.run(send(config_for(server.url, api="completions")))
    assert (record.failure, record.text) == (None, "x")
    assert server.paths == ["/v1/completions"]


def test_a_stream_cut_into_single_bytes() -> None:
    whole = b"".join((chat_chunk("ü"), chat_chunk("✓", "stop"), usage_chunk(2), event("[DONE]")))
    pieces = tuple(whole[i : i + 1] for i in range(len(whole)))
    record = record_of(lambda i, body: Answer(pieces))
    assert (record.failure, record.text, record.output_tokens) == (None, "ü✓", 2)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refuse(500, "it broke"), "HTTP 500: it broke"),
        (refuse(429, "queue full"), "HTTP 429: queue full"),
        (Answer((chat_chunk("a"), event({"error": {"message": "died"}}))),
         "error in the stream: died"),
        (Answer((chat_chunk("a"),)), "stream ended early: neither finish_reason nor [DONE]"),
        (Answer(()), "stream ended early: neither finish_reason nor [DONE]"),
        (Answer((chat_chunk("a"),), breaks=True), "stream ended early: the connection broke"),
        (Answer((b'{"choices": []}',), content_type="application/json"),
         'HTTP 200 without a stream: {"choices": []}'),
        (Answer((b'{"error": "x"}',), content_type="application/json"),
         "HTTP 200 without a stream: x"),
    ],
)  # fmt: skip
def test_failures_have_a_reason(answer: Answer, reason: str) -> None:
    record = record_of(lambda i, body: answer)
    assert record.failure == reason
    assert record.end >= record.sent


def test_an_error_that_the_end_of_the_stream_cuts_short_is_not_lost() -> None:
    record = record_of(lambda i, body: Answer((b'data: {"error": "last words"}',)))
    assert record.failure == "error in the stream: last words"


def test_a_connection_closed_before_the_answer() -> None:
    record = record_of(lambda i, body: Answer(dies=True))
    assert record.failure == "the server closed the connection without an answer"


def test_a_stream_that_never_ends_times_out() -> None:
    record = record_of(lambda i, body: Answer((chat_chunk("a"),), hangs=True), timeout=0.2)
    assert record.failure == "no end within 0.2 s"
    assert record.text == "a"


def test_what_follows_done_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.bench.client._DRAIN_S", 0.01)
    pieces = (chat_chunk("a", "stop"), event("[DONE]"))
    record = record_of(lambda i, body: Answer(pieces, hangs=True), timeout=60.0)
    assert record.failure is None


def test_a_refused_connection() -> None:
    port = free_port()
    record = asyncio.run(send(config_for(f"http://127.0.0.1:{port}")))
    assert record.failure == f"connection refused by 127.0.0.1:{port}"


def test_ignore_eos_is_dropped_when_the_server_rejects_it() -> None:
    def script(index: int, body: dict[str, Any]) -> Answer:
        if "ignore_eos" in body:
            return refuse(400, "Unrecognized request argument supplied: ignore_eos")
        return stream(["a"])

    async def twice(config: BenchConfig, rejected: list[str]) -> list[RequestRecord]:
        async with open_session(config) as session:
            client = Client(
                session, config, model="m", on_chunk=lambda: None, on_rejected=rejected.append
            )
            both = [client.send(i, PROMPT, due=0.0) for i in range(2)]
            return [*(await asyncio.gather(*both)), await client.send(2, PROMPT, due=0.0)]

    rejected: list[str] = []
    with FakeServer(script) as server:
        records = asyncio.run(twice(config_for(server.url), rejected))
    assert [record.failure for record in records] == [None, None, None]
    assert rejected == ["ignore_eos"]
    assert "ignore_eos" not in server.bodies[-1]
    assert server.bodies[-1]["stream_options"] == {"include_usage": True}


def test_a_field_of_extra_body_is_never_dropped() -> None:
    rejected: list[str] = []
    with FakeServer(lambda i, body: refuse(400, "no ignore_eos")) as server:
        config = config_for(server.url, extra_body='{"ignore_eos": true}')
        record = asyncio.run(send(config, rejected=rejected))
    assert record.failure == "HTTP 400: no ignore_eos"
    assert rejected == []
    assert len(server.bodies) == 1


def test_headers_and_extra_body_are_sent() -> None:
    with FakeServer(lambda i, body: stream(["a"])) as server:
        asyncio.run(send(config_for(server.url, api_key="k", extra_body='{"top_k": 3}')))
    assert server.headers[0]["Authorization"] == "Bearer k"
    assert server.headers[0]["Accept-Encoding"] == "identity"
    assert server.headers[0]["Content-Type"] == "application/json"
    assert server.bodies[0]["top_k"] == 3


def test_the_first_model_is_found() -> None:
    async def find(config: BenchConfig) -> str:
        async with open_session(config) as session:
            return await find_model(session, config)

    with FakeServer(lambda i, body: stream([])) as server:
        assert asyncio.run(find(config_for(server.url))) == MODEL
    with (
        FakeServer(lambda i, body: stream([]), models=refuse(401, "key?")) as server,
        pytest.raises(RequestFailed, match="HTTP 401: key"),
    ):
        asyncio.run(find(config_for(server.url)))
    with pytest.raises(RequestFailed, match="refused"):
        asyncio.run(find(config_for(f"http://127.0.0.1:{free_port()}")))
