"""The wire: what is sent arrives as it was, and neither side ever waits for the other."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.config import EngineConfig
from paceline.serve import wire
from paceline.serve.wire import EngineSide, FrontSide
from paceline.types import (
    AbortRequests,
    AddRequest,
    Delta,
    EngineStats,
    Failed,
    FinishReason,
    Progress,
    Ready,
    SamplingParams,
    ShapeStats,
    Shutdown,
    SpeculationStats,
    StepOutputs,
)

TO_ENGINE = [
    AddRequest(id="a-0", prompt=(1, 2, 3), params=SamplingParams(seed=-5, stop=("x", "é"))),
    AddRequest(id="b-1", prompt=(4,), params=SamplingParams(max_draft_tokens=0)),
    AbortRequests(ids=("a-0", "b-1")),
    Shutdown(),
]
FROM_ENGINE = [
    Progress(stage="loading weights", done=1, total=3),
    Ready(max_model_len=8, kv_tokens=16, description="cpu"),
    StepOutputs(
        deltas=(Delta(id="a-0", tokens=(7,), finish=FinishReason.STOP, cached_tokens=2),),
        stats=EngineStats(running=1, step_seconds_total=0.5),
    ),
    StepOutputs(
        deltas=(Delta(id="a-0", tokens=(7, 8), drafted=3, accepted=1),),
        stats=EngineStats(
            speculation=SpeculationStats(
                depth=3,
                budget=3,
                reason="é",
                attempts=(1, 1, 1),
                accepted=(1, 0, 0),
                recent=(1.0, 0.0, 0.0),
                shapes=(
                    ShapeStats(
                        depth=3,
                        branching=1,
                        reason="é",
                        steps=1,
                        committed=2,
                        drafted=3,
                        accepted=1,
                    ),
                ),
                suspect=True,
            )
        ),
    ),
    Failed(message="out of memory"),
]


def test_messages_survive_encoding() -> None:
    assert wire.decode_to_engine(wire.encode_to_engine(TO_ENGINE)) == TO_ENGINE
    for message in FROM_ENGINE:
        assert wire.decode_from_engine(wire.encode_from_engine(message)) == message


def test_launch_survives_one_command_line_argument() -> None:
    launch = wire.EngineLaunch(
        config=EngineConfig(model="/models/a b", kv_tokens=5),
        to_engine="ipc:///x/to",
        from_engine="ipc:///x/from",
        parent_pid=1,
    )
    line = wire.encode_launch(launch)
    assert "\n" not in line
    assert wire.decode_launch(line) == launch


def test_a_broken_launch_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_launch('{"config": {}}')


@pytest.fixture
def front() -> Iterator[FrontSide]:
    front = FrontSide()
    yield front
    front.close()


def receive_all(front: FrontSide, count: int) -> list[object]:
    received: list[object] = []
    while len(received) < count:
        received += front.receive()
    return received


def test_both_directions_in_order(front: FrontSide) -> None:
    with EngineSide(front.launch(EngineConfig())) as engine:
        for message in FROM_ENGINE:
            engine.send(message)
        assert receive_all(front, len(FROM_ENGINE)) == FROM_ENGINE
        # The engine has connected, since its messages came: nothing sent now is refused.
        assert front.send(TO_ENGINE[:2])
        assert front.send(TO_ENGINE[2:])
        got: list[object] = []
        while len(got) < len(TO_ENGINE):
            got += engine.receive(wait_ms=1000)
        assert got == TO_ENGINE


def test_nothing_blocks_when_nobody_is_there(front: FrontSide) -> None:
    assert front.send(TO_ENGINE) is False
    assert front.receive() == []


def test_the_last_words_of_an_engine_arrive_after_it_closed(front: FrontSide) -> None:
    with EngineSide(front.launch(EngineConfig())) as engine:
        engine.send(Failed(message="bye"))
    assert receive_all(front, 1) == [Failed(message="bye")]


def test_only_this_user_can_reach_the_sockets(front: FrontSide) -> None:
    address = front.launch(EngineConfig()).to_engine
    directory = Path(address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_closing_leaves_no_files() -> None:
    front = FrontSide()
    directory = Path(front.launch(EngineConfig()).to_engine.removeprefix("ipc://")).parent
    assert directory.is_dir()
    front.close()
    assert not directory.exists()


def test_loopback_where_the_path_is_too_long_for_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(wire.tempfile, "tempdir", str(long))
    front = FrontSide()
    try:
        launch = front.launch(EngineConfig())
        assert launch.from_engine.startswith("tcp://127.0.0.1:")
        with EngineSide(launch) as engine:
            engine.send(Failed(message="heard"))
            assert receive_all(front, 1) == [Failed(message="heard")]
    finally:
        front.close()


def test_parent_gone() -> None:
    assert not wire.parent_gone(os.getppid())
    # A child whose parent is said to be somebody else takes itself for an orphan.
    code = "from paceline.serve.wire import parent_gone; print(parent_gone(1_000_000_000))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "True"


def test_the_http_side_never_imports_the_engine() -> None:
    code = (
        "import sys, paceline.serve.server\n"
        "heads = ('torch', 'paceline.sched', 'paceline.plan', 'paceline.exec', 'paceline.cache',"
        " 'paceline.attention', 'paceline.llm')\n"
        "print([m for m in sys.modules if any(m == h or m.startswith(h + '.') for h in heads)])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
