"""The real thing: `paceline serve` as a process, the demo model, the official client."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"


@contextlib.contextmanager
def running_server(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server on a free port; its URL and process. It must end cleanly on SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found, line + process.stderr.read()
        yield found[0], process
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        errors = process.stderr.read()
        assert "Traceback" not in errors, errors
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    flags = ("--dtype", "float32", "--kv-tokens", "8192", "--max-model-len", "2048")
    with running_server(*flags, "--max-running-requests", "8") as (url, _):
        yield url


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as made:
        yield made


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found = re.findall(r'^(paceline_\w+(?:{state="\w+"})?) ([\d.e+]+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def wait_until(condition: Any, *, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def test_chat_and_completions(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=30,
    )
    assert "Paris" in (chat.choices[0].message.content or "")
    text = client.completions.create(
        model=MODEL, prompt=["The capital of Italy is", "The capital of Spain is"],
        temperature=0, max_tokens=3,
    )  # fmt: skip
    assert ["Rome" in text.choices[0].text, "Madrid" in text.choices[1].text] == [True, True]
    assert text.usage is not None and text.usage.completion_tokens == 6


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell a story with an émigré 😀."}],
        max_tokens=40,
        temperature=0.8,
        seed=3,
    )
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40


def test_texts_in_company_are_those_alone(client: openai.OpenAI) -> None:
    def ask(i: int) -> str:
        reply = client.completions.create(
            model=MODEL,
            prompt=f"{i} things I like about my town:",
            max_tokens=24,
            temperature=0.8 if i % 2 else 0,
            seed=i,
        )
        return reply.choices[0].text

    alone = [ask(i) for i in range(10)]
    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(ask, range(10))) == alone


def test_n_choices_differ_and_the_first_is_the_single_one(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(
        model=MODEL, prompt="A name for a cat:", max_tokens=8, temperature=1.2, seed=1
    )
    many = client.completions.create(**asked, n=4).choices
    assert [c.index for c in many] == [0, 1, 2, 3]
    assert len({c.text for c in many}) > 1
    assert many[0].text == client.completions.create(**asked).choices[0].text


def test_a_disconnected_client_leaves_nothing_behind(server: str) -> None:
    address = server.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    ).encode()
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert b"data:" in connection.recv(65536) + connection.recv(65536)
        assert metrics(server)["paceline_requests_running"] == 1
    wait_until(lambda: metrics(server)["paceline_requests_running"] == 0)
    seen = metrics(server)
    pages = [seen[f'paceline_kv_pages{{state="{s}"}}'] for s in ("free", "cached", "used")]
    assert pages[2] == 0 and sum(pages) == 8192 / 16


def test_a_bad_request_hurts_nobody(client: openai.OpenAI) -> None:
    results: list[str] = []

    def good() -> None:
        reply = client.completions.create(
            model=MODEL, prompt="The capital of France is", max_tokens=20, temperature=0
        )
        results.append(reply.choices[0].text)

    good()
    thread = threading.Thread(target=good)
    thread.start()
    for bad in ({"max_tokens": 0}, {"temperature": -1}, {"prompt": ""}, {"prompt": "x " * 3000}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**({"model": MODEL, "prompt": "x"} | bad))  # type: ignore[call-overload]
        assert caught.value.param == next(iter(bad))
    thread.join()
    assert results[0] == results[1]


def test_ctrl_c_ends_a_busy_server_cleanly() -> None:
    with running_server("--api-key", "secret") as (url, process):
        stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            stream = client.completions.create(
                model=MODEL,
                prompt="On",
                max_tokens=4000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError):
                for _ in stream:
                    pass
        assert process.wait(20) == 0
