"""The H200 table that comes along: adaptive is never behind, and context decides at the top."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan.adaptive import PROBING
from paceline.plan.arms import policy_of_arm
from paceline.plan.cost_file import CostFile, read_costs
from paceline.plan.forecast import forecast
from paceline.plan.simulation import Setting, settled, simulate
from paceline.plan.step import RequestShape
from paceline.simulate import SimulateConfig, run_simulation, split_arms

H200 = read_costs("h200-llama-3.1-8b")
MOST = RequestShape(depth=5, branching=4, drafts=16)
NAMES = ("plain", "static:1", "static:2", "static:3", "static:5", "tree:4", "tree:16", "adaptive")
ARMS = {name: policy_of_arm(name, H200, most=MOST) for name in NAMES}
EVERY = sorted({1 << i for i in range(11)} | {3, 6, 12, 24, 48, 96, 150, 192, 384, 768})


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7, 0.8])
@pytest.mark.parametrize("context", [300, 4000])
def test_adaptive_is_at_least_every_other_arm(acceptance: float, context: int) -> None:
    cases = [
        Setting(acceptance=acceptance, context=context, concurrency=concurrency)
        for concurrency in EVERY
    ]
    for outcomes in simulate(H200, ARMS, cases):
        adaptive = next(each for each in outcomes if each.arm == "adaptive")
        assert adaptive.regret <= 1e-3, adaptive  # context is rounded


def test_the_right_depth_depends_on_context() -> None:
    """At 256 requests plain decoding beats chains of 3 at 400 tokens, and loses at 4,000."""

    def rates(context: int, acceptance: float) -> dict[str, float]:
        setting = Setting(acceptance=acceptance, context=context, concurrency=256)
        (outcomes,) = simulate(H200, ARMS, [setting])
        return {each.arm: each.expected.rate for each in outcomes}

    for acceptance in (0.5, 0.7):
        short, long = rates(400, acceptance), rates(4000, acceptance)
        assert short["plain"] > short["static:3"] and long["plain"] < long["static:3"]
    short, long = rates(400, 0.3), rates(4000, 0.3)
    assert short["adaptive"] == short["plain"] and long["adaptive"] > long["plain"]


@settings(deadline=None, max_examples=40)
@given(st.floats(0, 0.98), st.integers(0, 8000), st.integers(1, 1024))
def test_the_forecast_is_what_the_policy_itself_expects(
    acceptance: float, context: int, concurrency: int
) -> None:
    setting = Setting(acceptance=acceptance, context=context, concurrency=concurrency)
    choice = settled(ARMS["adaptive"], setting.load)
    found = forecast(H200, setting.load, choice)
    assert found.tokens == pytest.approx(choice.predicted_tokens)
    assert found.seconds == pytest.approx(choice.predicted_seconds, rel=0.01)  # context is rounded
    assert choice.reason != "probe" and PROBING < 0.01


def test_a_table_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, output = tmp_path / "costs.json", tmp_path / "out.json"
    costs.write_text(
        '{"format": 1, "tokens": [[1, 0.01], [64, 0.02]], "context": [[1, 0]],'
        ' "level": [[1, 0.001]], "proposal": 0}'
    )
    config = SimulateConfig(
        costs=str(costs), acceptance=(0.6,), context=(10,), concurrency=(1, 64),
        arms="plain,static:2,adaptive", output=str(output),
    )  # fmt: skip
    assert run_simulation(config) == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["worst_regret"]["adaptive"] <= 0.0001
    assert "static:2" in out and "depth x budget" in out
    rows = json.loads(output.read_text())["outcomes"]
    plain = next(row for row in rows if row["arm"] == "plain" and row["concurrency"] == 64)
    assert plain["tokens_per_second"] == pytest.approx(64 / 0.02)


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", '{"format": 2, "tokens": [[1, 1]], "context": [[1, 0]], "level": [[1, 0]],'
        ' "proposal": 0}',
        '{"tokens": [], "context": [[1, 0]], "level": [[1, 0]], "proposal": 0}',
        '{"tokens": [[1, 0]], "context": [[1, 0]], "level": [[1, 0]], "proposal": 0}',
        '{"tokens": [[1, -1]], "context": [[1, 0]], "level": [[1, 0]], "proposal": 0}',
        '{"tokens": [[1, 1]], "context": [[1, 0]], "level": [[1, 0]], "proposal": 0, "other": 1}',
    ],
)  # fmt: skip
def test_a_table_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cost table .* cannot be read"):
        read_costs(str(path))
    with pytest.raises(ConfigError, match=r"no cost table 'nowhere'.*h200"):
        read_costs("nowhere")


def test_a_table_comes_back_from_its_file() -> None:
    assert CostFile.of(H200).table == H200


@pytest.mark.parametrize(
    "name", ["", "fast", "static", "static:0", "static:9", "static:x", "tree:64", "tree:-1",
             "threshold:3", "threshold:a:b", "schedule:", "schedule:[]", "schedule:[[2,3,1]]",
             "schedule:3", "plain:1", "adaptive:2"]
)  # fmt: skip
def test_arms_that_say_nothing_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        policy_of_arm(name, H200, most=MOST)


def test_arms_between_commas() -> None:
    assert split_arms("plain, schedule:[[1,4,5],[5,9,0]],adaptive") == [
        "plain", "schedule:[[1,4,5],[5,9,0]]", "adaptive",
    ]  # fmt: skip
    for text in ("", "plain,,adaptive", "plain,plain"):
        with pytest.raises(ConfigError):
            split_arms(text)
