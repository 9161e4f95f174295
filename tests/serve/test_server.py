"""The server as a process: start, ready line, signals, engine death, a port that is taken."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.config import ServerConfig
from paceline.errors import ConfigError
from paceline.serve.server import listen

SCRIPT = Path(__file__).parent / "fake_engine_process.py"
# What `paceline serve` does around `serve`, with an engine that has no model.
PROGRAM = """
import sys
from paceline.config import EngineConfig, ServerConfig
from paceline.errors import PacelineError
from paceline.serve.server import serve
mode, port, model = sys.argv[2:]
try:
    sys.exit(serve(
        EngineConfig(model=model or None),
        ServerConfig(port=int(port)),
        engine_command=(sys.executable, sys.argv[1], mode),
    ))
except PacelineError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
"""


@contextmanager
def server(mode: str, *, port: int = 0, model: str = "") -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(SCRIPT), mode, str(port), model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PACELINE_API_KEY": "from-env"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], 60)
    assert readable, "the server did not become ready"
    return process.stdout.readline()


def url_in(line: str) -> str:
    found = re.search(r"http://\S+", line)
    assert found is not None, line
    return found.group()


def children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listing.read_text().split()]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_start_serve_stop(number: signal.Signals) -> None:
    with server("serve") as process:
        line = ready_line(process)
        assert line.startswith("Serving SmolLM2-135M-Instruct on http://127.0.0.1:")
        assert "context 512 tokens" in line
        with httpx.Client(
            base_url=url_in(line), headers={"authorization": "Bearer from-env"}
        ) as http:
            assert http.get("/health").status_code == 200
            said = http.get("/v1/speculation").json()
            assert (said["algorithm"], said["policy"], said["draft_model"]) == ("NONE", "off", None)
            body = {"model": "SmolLM2-135M-Instruct", "prompt": [66, 67, 68]}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 4
        (engine,) = children(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert (out, err) == ("", "loading weights\n")
        assert not exists(engine)


def streaming(url: str) -> tuple[threading.Thread, list[str]]:
    """Reads one stream in a thread, into a list."""
    received: list[str] = []

    def read() -> None:
        body = {"model": "SmolLM2-135M-Instruct", "prompt": list(range(300, 700)), "stream": True}
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json=body,
            headers={"authorization": "Bearer from-env"},
        ) as response:
            received.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, received


def wait_for_running(url: str) -> None:
    deadline = time.monotonic() + 20
    while "paceline_requests_running 1.0" not in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_open_streams_are_told_when_the_server_stops() -> None:
    with server("serve") as process:
        url = url_in(ready_line(process))
        thread, received = streaming(url)
        wait_for_running(url)
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert "shutting down" in json.loads(received[-1][6:])["error"]["message"]
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in err


def test_the_engines_death_reaches_the_clients_and_ends_the_server() -> None:
    with server("serve") as process:
        url = url_in(ready_line(process))
        thread, received = streaming(url)
        wait_for_running(url)
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGKILL)
        thread.join()
        assert "SIGKILL" in json.loads(received[-1][6:])["error"]["message"]
        _, err = process.communicate(timeout=30)
        assert process.returncode == 1
        assert err.splitlines()[-1] == (
            "paceline: the engine process was killed by SIGKILL (out of memory?); shutting down"
        )
        assert "Traceback" not in err


def test_stop_while_starting() -> None:
    with server("stuck") as process:
        deadline = time.monotonic() + 30
        while not children(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "")
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("mode", "model", "said"),
    [
        ("fail", "", "error: no memory for the K/V cache"),
        ("exit", "", "error: the engine process ended with exit code 3"),
        ("serve", "/nowhere/model.gguf", "error: .*/nowhere/model.gguf"),
        ("exit", "/nowhere/model.gguf", "error: .*/nowhere/model.gguf"),
    ],
)
def test_a_start_that_fails_is_one_line(mode: str, model: str, said: str) -> None:
    with server(mode, model=model) as process:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, "")
        lines = [line for line in err.splitlines() if line != "loading weights"]
        assert len(lines) == 1
        assert re.match(said, lines[0])


def test_a_taken_port_is_one_line() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            listen("127.0.0.1", port)
        with server("serve", port=port) as process:
            _, err = process.communicate(timeout=60)
            assert process.returncode == 2
            assert err.startswith(f"error: port {port} on 127.0.0.1 is taken")
            assert len(err.splitlines()) == 1


def test_an_unknown_host_is_one_line() -> None:
    with pytest.raises(ConfigError, match="--host"):
        listen("no such host", 0)


def test_listening_on_every_interface_and_ipv6() -> None:
    for host in ("0.0.0.0", "::1"):
        try:
            listener = listen(host, 0)
        except ConfigError:
            assert host == "::1"  # a machine without IPv6
            continue
        with listener:
            assert listener.getsockname()[1] > 0


def test_a_port_is_free_again_after_a_run() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = _accept(first)
            accepted.close()
    listen("127.0.0.1", port).close()


def _accept(listener: socket.socket) -> tuple[socket.socket, object]:
    listener.setblocking(True)
    return listener.accept()


def test_the_default_configuration_is_loopback() -> None:
    assert ServerConfig().host == "127.0.0.1"
