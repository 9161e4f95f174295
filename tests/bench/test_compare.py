"""Comparisons: order, regret, dead servers; and the schedules that they imply."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import compare as module
from paceline.bench.compare import CompareConfig, compare
from paceline.bench.comparison import Cell, Grid, document, grid_of, noise, regrets, table
from paceline.bench.envelope import draw
from paceline.bench.servers import arms_of
from paceline.bench.tune import TuneConfig, drafts_of, forms, schedule, tune
from paceline.errors import ConfigError
from paceline.plan.policy import Schedule

from .fake_server import Answer, FakeServer, stream

RATES = st.floats(1, 1000)


def answers(number: int, body: dict[str, Any]) -> Answer:
    return stream(["a", "b", "c", "d"], usage=4)


def grid_from(rates: dict[str, list[float]], levels: list[int]) -> Grid:
    return {
        name: {level: Cell((rate,), 4, 0) for level, rate in zip(levels, row, strict=True)}
        for name, row in rates.items()
    }


@given(st.lists(st.tuples(RATES, RATES, RATES), min_size=1, max_size=5))
def test_regret_is_what_is_lost_to_the_best(rows: list[tuple[float, float, float]]) -> None:
    levels = [1 << i for i in range(len(rows))]
    names = ("plain", "static:3", "plain#2")
    grid = grid_from({n: [row[i] for row in rows] for i, n in enumerate(names)}, levels)
    lost = regrets(grid)
    for level, (plain, static, again) in zip(levels, rows, strict=True):
        best = max(plain, static)
        assert lost["plain"][level] == pytest.approx(1 - plain / best)
        assert lost["static:3"][level] == pytest.approx(1 - static / best)
        assert lost["plain#2"][level] == pytest.approx(1 - again / best)
    assert noise(grid) == pytest.approx(max(abs(c / a - 1) for a, _, c in rows))
    assert grid_of(json.loads(json.dumps(document(grid, {})))) == grid


def test_an_arm_with_failures_is_not_the_best() -> None:
    grid: Grid = {
        "plain": {1: Cell((10.0,), 4, 0)},
        "fast": {1: Cell((99.0,), 4, 1)},
        "dead": {1: Cell((0.0,), 4, 4)},
    }
    assert regrets(grid)["plain"][1] == 0 and regrets(grid)["dead"][1] == 1
    shown = table(grid)
    assert "1 failed" in shown and "4/4" in shown
    assert noise(grid) is None


def test_medians_over_rounds() -> None:
    cell = Cell().plus(10, 4, 0).plus(30, 4, 1).plus(11, 4, 0)
    assert (cell.rate, cell.requests, cell.failed) == (11, 12, 1)


def test_names_of_arms() -> None:
    arms = arms_of("plain,static:3,plain,adaptive", ["theirs=http://127.0.0.1:1"])
    names = ["plain", "static:3", "plain#2", "adaptive", "theirs"]
    assert [arm.name for arm in arms] == names
    assert arms[1].flags[-1] == "3" and arms[-1].url == "http://127.0.0.1:1"
    assert [arm.name for arm in arms if arm.repeats] == ["plain#2"]
    for text, servers in (("", []), ("fast", []), ("static:x", []), ("", ["nourl"])):
        with pytest.raises(ConfigError):
            arms_of(text, servers)


def test_servers_take_turns_and_a_dead_one_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    real = module.run

    async def noted(config, *args, **kwargs):  # type: ignore[no-untyped-def]
        order.append((config.concurrency[0], config.server_url))
        return await real(config, *args, **kwargs)

    monkeypatch.setattr(module, "run", noted)
    with FakeServer(answers) as first, FakeServer(answers) as second:
        dead = "http://127.0.0.1:9"
        config = CompareConfig(
            server=(f"a={first.url}", f"dead={dead}", f"b={second.url}"), concurrency=(1, 2),
            rounds=2, requests_per_level=2, max_tokens=4, timeout=5,
            output=str(tmp_path / "out" / "cmp"),
        )  # fmt: skip
        assert compare(config) == 1
    urls = [first.url, dead, second.url]
    assert order == [(level, url) for level in (1, 2) for _ in range(2) for url in urls]
    out = capsys.readouterr().out
    said = json.loads(out.splitlines()[-1])
    assert said["failed"] > 0 and said["worst_regret"]["dead"] == 1
    found = json.loads((tmp_path / "out" / "cmp.json").read_text())
    assert found["arms"]["a"]["1"]["failed"] == 0 and len(found["arms"]["a"]["1"]["rounds"]) == 2
    assert found["arms"]["dead"]["2"]["failed"] == 4
    assert (tmp_path / "out" / "cmp.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out" / "cmp.svg").read_text()


def test_a_server_that_does_not_start_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CompareConfig(
        arms="plain", serve_flags=f"{tmp_path}/nothing", concurrency=(1,), rounds=1,
        requests_per_level=1, max_tokens=2, output=str(tmp_path / "cmp"),
    )  # fmt: skip
    assert compare(config) == 1
    said = capsys.readouterr()
    assert re.search(r"plain did not start: .*nothing", said.err)
    assert json.loads(said.out.splitlines()[-1])["worst_regret"] == {"plain": 1.0}


def test_the_picture_shows_every_arm(tmp_path: Path) -> None:
    grid = grid_from({"plain": [50, 190], "adaptive": [120, 195], "plain#2": [51, 189]}, [1, 4])
    for path in draw(grid, tmp_path / "p", "a title"):
        assert path.stat().st_size > 5000


# --- Schedules -------------------------------------------------------------------------------


@given(st.lists(st.tuples(RATES, RATES, RATES), min_size=1, max_size=6))
def test_a_schedule_has_no_gaps_and_is_no_slower(rows: list[tuple[float, float, float]]) -> None:
    levels = [1 << i for i in range(len(rows))]
    names = ("plain", "static:2", "static:5")
    grid = grid_from({n: [row[i] for row in rows] for i, n in enumerate(names)}, levels)
    grid["adaptive"] = {level: Cell((1e6,), 4, 0) for level in levels}
    steps = schedule(grid)
    ours = [[step.first, step.last, step.drafts] for step in steps]
    Schedule.parse(ours)
    chosen = {n: drafts for first, last, drafts in ours for n in range(first, last + 1)}
    for level, row in zip(levels, rows, strict=True):
        rate = row[names.index({0: "plain"}.get(chosen[level], f"static:{chosen[level]}"))]
        assert rate >= 0.98 * max(row) - 1e-9
    for text in forms(steps).values():
        assert text
    vllm, sglang, tensorrt = (json.loads(t) for t in list(forms(steps).values())[1:])
    assert vllm["num_speculative_tokens_per_batch_size"] == ours
    assert all(sglang[str(f)] == sglang[str(n)] == {"candidate_steps": [d]} for f, n, d in ours)
    assert tensorrt["draft_len_schedule"] == {str(n): d for _, n, d in ours}


def test_fewer_drafts_where_more_win_by_noise_only() -> None:
    grid = grid_from({"plain": [100, 100], "static:3": [104, 120], "plain#2": [95, 100]}, [1, 8])
    assert [(step.drafts) for step in schedule(grid)] == [0, 3]
    assert (drafts_of("plain"), drafts_of("static:4"), drafts_of("adaptive")) == (0, 4, None)


def test_tune_reads_what_compare_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = grid_from({"plain": [50, 300], "static:3": [120, 200]}, [1, 16])
    path = tmp_path / "cmp.json"
    path.write_text(json.dumps(document(grid, {})))
    assert tune(TuneConfig(from_=(str(path),))) == 0
    out = capsys.readouterr().out
    assert "--speculative-schedule '[[1, 4, 3], [5, 512, 0]]'" in out
    for engine in ("vLLM", "SGLang", "TensorRT-LLM"):
        assert engine in out


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"benchmark": "paceline bench"}',
             '{"benchmark": "paceline compare", "format": 9}',
             '{"benchmark": "paceline compare", "format": 1, "arms": {"plain": {"x": 1}}}',
             '{"benchmark": "paceline compare", "format": 1, "arms": {}}']
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        tune(TuneConfig(from_=(str(path),)))
    with pytest.raises(ConfigError, match="--from"):
        TuneConfig()
