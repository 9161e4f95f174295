"""Traces: what is written is read back, whatever happens to the file; replays need no model."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.pool import PagePool
from paceline.errors import ConfigError
from paceline.plan.adaptive import Adaptive
from paceline.plan.cost import Pace
from paceline.plan.cost_file import CostFile, read_costs
from paceline.plan.step import (
    NOTHING,
    PLAIN,
    Choice,
    DraftShape,
    Load,
    RequestShape,
    Row,
    RowResult,
    StepPlan,
)
from paceline.plan.step import StepResult as Result
from paceline.plan.survival import Survival
from paceline.replay import ReplayConfig, run_replay
from paceline.sched.estimates import Estimates
from paceline.trace import FORMAT, Header, Record, TraceWriter, read_trace

H200 = read_costs("h200-llama-3.1-8b")
MOST = RequestShape(depth=4, branching=2, drafts=8)
HEADER = Header(policy="adaptive", most=MOST, costs=CostFile.of(H200))

SHARES = st.floats(0, 1)
LOADS = st.builds(
    Load,
    running=st.integers(0, 99), decodes=st.integers(0, 99), prefill_tokens=st.integers(0, 999),
    context_tokens=st.integers(0, 10**6), waiting=st.integers(0, 9), rows=st.integers(0, 99),
    survival=st.builds(
        Survival, offered=SHARES, ranks=st.lists(SHARES, max_size=3).map(tuple),
        groups=st.lists(st.tuples(SHARES, st.integers(1, 9)), max_size=2).map(tuple),
        spread=st.lists(st.lists(st.tuples(SHARES, SHARES), max_size=2).map(tuple), max_size=2)
        .map(tuple),
    ),
    pace=st.builds(Pace, st.floats(0.5, 2), st.lists(st.floats(0.5, 2), max_size=3).map(tuple)),
    latest=st.builds(DraftShape, depth=st.just(2), branching=st.integers(1, 4),
                     budget=st.integers(1, 99)),
    plain_steps=st.integers(0, 99), missed=st.floats(0, 1),
)  # fmt: skip
CHOICES = st.builds(
    Choice, shape=st.just(DraftShape(depth=3, budget=7)), reason=st.text(), floor=SHARES,
    widths=st.lists(st.integers(0, 8), max_size=3).map(tuple), missed=st.floats(-1, 1),
    predicted_seconds=st.none() | SHARES, predicted_tokens=st.none() | SHARES,
)  # fmt: skip


def result(load: Load, choice: Choice, rows: tuple[RowResult, ...], seconds: float) -> Result:
    plan = StepPlan(
        rows=tuple(Row(slot=i, generation=1, start=9) for i in range(len(rows))),
        choice=choice, load=load, reservation=PagePool(1, 1).reserve({}),
    )  # fmt: skip
    return Result(plan=plan, rows=rows, seconds=seconds)


@given(steps=st.lists(st.tuples(LOADS, CHOICES, st.floats(0, 9)), max_size=4))
def test_every_field_comes_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Load, Choice, float]]
) -> None:
    row = RowResult(tokens=(5, 6), levels=(2, 1), proposed=(0.5, 0.4, 0.3))
    path = str(tmp_path_factory.mktemp("trace") / "trace.jsonl")
    writer = TraceWriter(path, HEADER)
    for load, choice, seconds in steps:
        writer.step(result(load, choice, (row, RowResult()), seconds))
    writer.close()
    header, records = read_trace(path)
    assert header == HEADER
    assert list(records) == [
        Record(load=load, choice=choice, drafted=3, drafting=1, committed=2, seconds=seconds)
        for load, choice, seconds in steps
    ]


def recorded(path: Path, steps: int = 400) -> list[Choice]:
    """A trace of eight requests whose drafts get ever worse; returns what was chosen."""
    policy, estimates, rng = Adaptive(H200, MOST, 10**9), Estimates(), random.Random(0)
    writer, chosen = TraceWriter(str(path), HEADER), []
    for number in range(steps):
        rows = [Row(slot=i, generation=1, start=50 + number) for i in range(8)]
        leans = {i: estimates.acceptance.lean(str(i)) for i in range(8)}
        load = estimates.load(rows, leans, running=8, waiting=0)
        choice = policy.choose(load)
        shares = estimates.shares(choice, load, leans)
        done = []
        for i in range(8):
            lucky = [rng.random() < 0.9 - number / steps for _ in range(shares[i])]
            hits = len(list(itertools.takewhile(bool, lucky)))
            walk = [((0.5,), 1)] * hits + [((0.5,), 0)] * (hits < shares[i])
            done.append(RowResult(
                tokens=(1,) * (hits + 1), levels=(1,) * shares[i], walk=tuple(walk),
                proposed=(0.5,) * shares[i],
            ))  # fmt: skip
        plan = StepPlan(
            rows=tuple(dataclasses.replace(row, drafts=shares[row.slot]) for row in rows),
            choice=choice, load=load, reservation=PagePool(1, 1).reserve({}),
        )  # fmt: skip
        outcome = Result(plan=plan, rows=tuple(done), seconds=(choice.predicted_seconds or 0) * 1.1)
        estimates.learn(outcome, [str(i) for i in range(8)], policy)
        writer.step(outcome)
        chosen.append(choice)
    writer.close()
    return chosen


def test_the_recorded_policy_chooses_as_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    chosen = recorded(path)
    assert len({choice.shape.depth for choice in chosen}) > 1
    assert run_replay(ReplayConfig(trace=str(path))) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["steps"] == said["same_choice"] == len(chosen)
    both = said["expected_tokens_per_second"]
    assert both["recorded"] == pytest.approx(both["adaptive"])
    assert said["prediction_error"]["median"] < 0.11


@pytest.mark.parametrize(
    "policy", ["off", "static:3", "tree:8", "threshold:4:2", "schedule:[[1,9,2]]"]
)
def test_other_policies_are_no_better_by_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    path = tmp_path / "trace.jsonl"
    recorded(path, 120)
    assert run_replay(ReplayConfig(trace=str(path), policy=policy)) == 0
    out = capsys.readouterr().out
    both = json.loads(out.splitlines()[-1])["expected_tokens_per_second"]
    assert both[policy] <= both["recorded"] * 1.01
    assert "another policy would have led to other loads" in out


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorded(path, 20)
    whole = path.read_bytes()
    for cut in (1, 5, 300):
        path.write_bytes(whole[:-cut])
        assert len(list(read_trace(str(path))[1])) == 19


def test_what_is_no_trace_of_this_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorded(path, 3)
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"paceline_trace":1', b'"paceline_trace":%d' % (FORMAT + 1), 1))
    with pytest.raises(ConfigError, match=r"format 2, this version of Paceline reads 1"):
        read_trace(str(path))
    for text in (b"", b"hello\n", b"[1]\n", b'{"version": "9"}\n'):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match="is no trace"):
            read_trace(str(path))
    first, second, *rest = good.split(b"\n")
    for broken in (b"{}", second.replace(b'"decodes":8', b'"decodes":"x"'), second[:40]):
        path.write_bytes(b"\n".join([first, second, broken, *rest]))
        with pytest.raises(ConfigError, match="line 3"):
            list(read_trace(str(path))[1])
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(str(tmp_path / "nowhere"))
    path.write_bytes(first + b"\n")
    with pytest.raises(ConfigError, match="no step in it"):
        run_replay(ReplayConfig(trace=str(path)))


def test_a_disk_that_is_full_ends_the_trace_only(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with caplog.at_level(logging.WARNING, "paceline"):
        writer = TraceWriter(str(full), HEADER)
        for _ in range(300):  # more than a buffer
            writer.step(result(NOTHING, Choice(shape=PLAIN, reason=""), (RowResult(),), 1.0))
        writer.close()
    assert [r.message for r in caplog.records if "ends here" in r.message]
    assert len(caplog.records) == 1


def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        TraceWriter(str(tmp_path / "missing" / "trace.jsonl"), HEADER)
