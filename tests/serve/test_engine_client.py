"""The engine client against real processes: start, failure, death, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.errors import EngineDied, EngineUnavailable
from paceline.serve.engine import Subscription
from paceline.serve.engine_client import EngineClient
from paceline.types import AddRequest, FinishReason, Progress, SamplingParams

SCRIPT = Path(__file__).parent / "fake_engine_process.py"


def client(mode: str, stages: list[Progress] | None = None) -> EngineClient:
    heard = [] if stages is None else stages
    return EngineClient(
        EngineConfig(), on_progress=heard.append, command=(sys.executable, str(SCRIPT), mode)
    )


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3)) -> AddRequest:
    return AddRequest(id=name, prompt=prompt, params=SamplingParams(max_tokens=100, seed=1))


async def read(subscription: Subscription) -> tuple[list[int], FinishReason | None, str | None]:
    tokens: list[int] = []
    while True:
        for delta in await subscription.take():
            tokens += delta.tokens
            if delta.finish is not None:
                return tokens, delta.finish, delta.error


def run(mode: str, scenario: Callable[[EngineClient], Awaitable[None]]) -> None:
    """Starts a client, runs the scenario with it, stops it."""

    async def whole() -> None:
        engine = client(mode)
        try:
            await engine.start()
            await scenario(engine)
        finally:
            await engine.stop()

    asyncio.run(whole())


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_start_request_stop() -> None:
    stages: list[Progress] = []

    async def scenario() -> None:
        engine = client("serve", stages)
        assert not engine.alive
        with pytest.raises(EngineUnavailable):
            engine.submit([request("early")])
        ready = await engine.start()
        assert ready.max_model_len == 512
        assert engine.alive
        subscription = engine.submit([request("a")])
        assert engine.open_requests == 1
        assert await read(subscription) == ([1, 2, 3, 256], FinishReason.STOP, None)
        assert engine.open_requests == 0
        assert engine.stats.steps_total > 0
        pid = engine.pid
        await engine.stop()
        assert not engine.alive
        assert pid is not None and not process_exists(pid)

    asyncio.run(scenario())
    assert stages == [Progress(stage="loading weights", done=1, total=2)]


def test_two_requests_at_once() -> None:
    async def scenario(engine: EngineClient) -> None:
        first, second = engine.submit([request("a")]), engine.submit([request("b", (7, 8))])
        assert (await read(second))[0] == [7, 8, 256]
        assert (await read(first))[0] == [1, 2, 3, 256]

    run("serve", scenario)


def test_a_closed_subscription_is_aborted_in_the_engine() -> None:
    async def scenario(engine: EngineClient) -> None:
        subscription = engine.submit([request("a", tuple(range(250)) * 100)])
        await subscription.take()
        assert engine.stats.running == 1
        subscription.close()
        assert engine.open_requests == 0
        while engine.stats.running:
            await asyncio.sleep(0.01)

    run("serve", scenario)


def test_a_failed_start_says_why() -> None:
    async def scenario(engine: EngineClient) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(EngineDied, match="no memory for the K/V cache"):
        run("fail", scenario)
    with pytest.raises(EngineDied, match="exit code 3"):
        run("exit", scenario)


def test_open_requests_learn_of_the_engines_death() -> None:
    async def scenario(engine: EngineClient) -> None:
        waiting = engine.submit([request("a"), request("b")])
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        tokens, finish, error = await asyncio.wait_for(read(waiting), 2)
        assert tokens == []
        assert finish is FinishReason.ERROR
        assert error is not None and "SIGKILL" in error
        assert not engine.alive
        assert await engine.died() == error
        with pytest.raises(EngineUnavailable):
            engine.submit([request("late")])

    run("silent", scenario)


def test_refuse_ends_open_requests_and_takes_no_more() -> None:
    async def scenario(engine: EngineClient) -> None:
        waiting = engine.submit([request("a")])
        engine.refuse("closing")
        assert await read(waiting) == ([], FinishReason.ERROR, "closing")
        with pytest.raises(EngineUnavailable, match="closing"):
            engine.submit([request("late")])

    run("silent", scenario)


def test_an_engine_that_does_not_listen_is_made_to_end() -> None:
    async def scenario() -> None:
        engine = client("stubborn")
        await engine.start()
        pid = engine.pid
        await engine.stop(grace_s=0.1)
        assert pid is not None and not process_exists(pid)

    asyncio.run(scenario())


def test_stop_without_start() -> None:
    asyncio.run(client("serve").stop())


PARENT = """
import asyncio, sys
from paceline.config import EngineConfig
from paceline.serve.engine_client import EngineClient
async def main():
    engine = EngineClient(EngineConfig(), command=(sys.executable, sys.argv[1], "silent"))
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_the_engine_ends_when_the_http_process_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(SCRIPT)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while process_exists(engine_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_exists(engine_pid)
