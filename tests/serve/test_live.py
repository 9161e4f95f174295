"""A real server on a socket: the official client, clients that leave, slow readers, huge bodies."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from paceline.serve.fake import FakeEngine
from paceline.types import FinishReason

from .http_support import MODEL, Live, live, says, silent

USER: Any = {"role": "user", "content": "hi"}


def client(server: Live, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


# --- The official client -------------------------------------------------------------------------


def test_the_openai_client_gets_answers_and_streams() -> None:
    engine = FakeEngine(reply=says("héllo 😀 END no"), cached_tokens=4)
    with live(engine, api_key="k") as server, client(server, "k") as api:
        assert [model.id for model in api.models.list()] == [MODEL]
        assert api.models.retrieve(MODEL).id == MODEL

        chat = api.chat.completions.create(model=MODEL, messages=[USER], stop="END", seed=1)
        assert chat.choices[0].message.content == "héllo 😀 "
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == len("héllo 😀 END".encode())
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 4

        completion = api.completions.create(model=MODEL, prompt=["a", "b"], n=2)
        assert [choice.text for choice in completion.choices] == ["héllo 😀 END no"] * 4

        chunks = list(
            api.chat.completions.create(
                model=MODEL,
                messages=[USER],
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"top_k": 5, "min_p": 0.1},
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "héllo 😀 END no"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 19

        parts = list(api.completions.create(model=MODEL, prompt="a", stream=True))
        assert "".join(part.choices[0].text for part in parts) == "héllo 😀 END no"
        assert parts[-1].choices[0].finish_reason == "stop"


def test_the_openai_client_understands_the_errors() -> None:
    engine = FakeEngine(reply=says("ab", FinishReason.ERROR))
    with live(engine, api_key="k") as server, client(server, "k") as api:
        with pytest.raises(openai.NotFoundError) as missing:
            api.completions.create(model="other", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            api.completions.create(model=MODEL, prompt="a", temperature=-1)
        assert bad.value.param == "temperature"
        with client(server, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.APIError, match="gave the request up"):
            list(api.completions.create(model=MODEL, prompt="a", stream=True))
        server.call(lambda: engine.die("killed"))
        with pytest.raises(openai.InternalServerError) as dead:
            api.completions.create(model=MODEL, prompt="a")
        assert dead.value.status_code == 503


def test_many_streams_at_once() -> None:
    async def one(api: openai.AsyncOpenAI, number: int) -> str:
        stream = await api.completions.create(
            model=MODEL, prompt=f"{number}", max_tokens=20, stream=True
        )
        return "".join([part.choices[0].text async for part in stream])

    async def scenario(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as api:
            return await asyncio.gather(*(one(api, number) for number in range(40)))

    with live() as server:
        assert asyncio.run(scenario(server.url)) == [bytes(range(20)).decode()] * 40


# --- Clients that leave --------------------------------------------------------------------------


def open_request(server: Live, **fields: Any) -> socket.socket:
    body = json.dumps({"model": MODEL, "prompt": "hi", **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_nothing_flows(stream: bool) -> None:
    engine = FakeEngine(reply=silent)
    with live(engine) as server:
        connection = open_request(server, stream=stream, n=2)
        wait_until(lambda: engine.open_requests == 2)
        connection.close()
        wait_until(lambda: engine.open_requests == 0)
        assert engine.aborted == [request.id for request in engine.requests]
        wait_until(lambda: b'requests_total{status="499"} 1.0' in server.front.metrics.text())


def test_a_client_that_leaves_in_the_middle_of_a_stream() -> None:
    engine = FakeEngine(reply=says("x" * 1_000_000), step_s=0.001)
    with live(engine) as server:
        connection = open_request(server, stream=True)
        assert connection.recv(100)
        connection.close()
        wait_until(lambda: engine.open_requests == 0)
        assert len(engine.aborted) == 1


def test_a_slow_reader_holds_up_nobody_and_gets_everything() -> None:
    size = 1_000_000
    engine = FakeEngine(
        reply=lambda request: says("x" * (size if request.prompt == (97,) else 5))(request),
        tokens_per_step=50_000,
    )
    with live(engine) as server:
        slow = open_request(server, prompt="a", stream=True)
        # The engine is done although nobody reads: what is left waits, merged, for the reader.
        wait_until(lambda: bool(engine.requests) and engine.stats.running == 0)
        with client(server) as api:
            assert api.completions.create(model=MODEL, prompt="b").choices[0].text == "xxxxx"
        received = bytearray()
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += slow.recv(1 << 20)
        slow.close()
        assert received.count(b"x") >= size
        assert engine.aborted == []


# --- Bodies and connections ----------------------------------------------------------------------


def test_a_huge_body_is_refused_by_its_announcement() -> None:
    with live() as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_huge_body_is_refused_without_an_announcement() -> None:
    with live() as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        connection.sendall(chunk + chunk)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_sends_all_of_a_huge_body_first_reads_the_answer() -> None:
    with live() as server:
        reply = httpx.post(
            f"{server.url}/v1/completions", content=b" " * 3_000_000, timeout=30, trust_env=False
        )
    assert reply.status_code == 413 and reply.json()["error"]["message"]


def test_a_connection_serves_on_after_an_error() -> None:
    with live() as server, httpx.Client(base_url=server.url) as http:
        for _ in range(3):
            assert http.post("/v1/completions", content=b"{").status_code == 400
            body = {"model": MODEL, "prompt": "hi", "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
