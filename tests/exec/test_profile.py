"""Profiling measures with the engine's own steps, leaves nothing behind, and is kept on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.engine import Engine
from paceline.exec import profile
from paceline.exec.drafter import Drafter, NgramDrafter
from paceline.exec.profile import Profiler, measured_costs
from paceline.model.llama import LlamaModel
from paceline.plan.adaptive import Adaptive
from paceline.plan.cost import ROUGH
from paceline.plan.step import RequestShape
from tests.eagle_support import drafter_model, eagle_config, make_drafter
from tests.test_engine import alone, make_engine, model, requests, run

__all__ = ["alone", "model"]  # fixtures


def engine_of(model: LlamaModel, kind: str, **options: Any) -> Engine:
    drafter: Drafter = NgramDrafter()
    if kind == "eagle":
        network = drafter_model(model, eagle_config())
        drafter = make_drafter(network, pages=200, page_size=4, slots=8)
    return make_engine(model, drafter=drafter, **options)


@pytest.mark.parametrize("kind", ["ngram", "eagle"])
def test_profiling_changes_nothing_of_what_is_generated(
    model: LlamaModel, alone: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "REPEATS", 1)
    engine = engine_of(model, kind, batched=64)
    stages = []
    costs = Profiler(engine.executor, engine.resolved).measure(lambda p: stages.append(p.stage))
    assert set(stages) == {"measuring steps", "measuring drafts"}
    assert costs.tokens.x[0] == 1 and costs.tokens.x[-1] == 64
    assert costs.step(1, 1, 0) > 0
    assert costs.drafting((1, 1)) >= costs.drafting((1,)) >= 0
    policy = Adaptive(costs, RequestShape(depth=3, branching=2, drafts=6), budget=50)
    if kind == "ngram":
        policy = Adaptive(costs, RequestShape.chain(4), budget=50)
    engine.scheduler.policy = policy
    for _ in range(2):
        assert run(engine, requests(16)) == alone
    assert engine.stats.drafter_failures_total == 0
    assert engine.scheduler.estimates.pace.snapshot().overall > 0


def cost_of(engine: Engine, mode: str) -> Any:
    return measured_costs(
        engine.executor, engine.resolved, mode=mode, names=("a", "b"), on_progress=lambda _: None
    )


def test_kept_on_disk_and_measured_again_where_it_is_of_no_use(
    model: LlamaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "REPEATS", 1)
    monkeypatch.setattr(profile, "TOKENS", (1, 8))
    engine = engine_of(model, "ngram")
    assert cost_of(engine, "none") is ROUGH
    assert not list(tmp_path.rglob("*.json"))
    first = cost_of(engine, "cached")
    (path,) = tmp_path.rglob("*.json")
    assert cost_of(engine, "cached") == first
    assert not caplog.records
    good = path.read_text()
    damaged = [
        "", "{", "[]", good.replace(" | b", " | c"),
        *(json.dumps(json.loads(good) | new) for new in ({"format": 0}, {"tokens": []}, {"x": 1})),
    ]  # fmt: skip
    for text in damaged:
        path.write_text(text)
        caplog.clear()
        assert cost_of(engine, "cached").tokens.x == first.tokens.x
        assert "measuring again" in caplog.text and "\n" not in caplog.messages[0]
        assert json.loads(path.read_text())["format"] == profile.FORMAT
    caplog.clear()
    before = path.stat().st_mtime_ns
    cost_of(engine, "fresh")
    assert path.stat().st_mtime_ns != before and not caplog.records


def test_a_place_that_cannot_be_written_is_a_warning(
    model: LlamaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (tmp_path / "paceline").write_text("a file where a directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "REPEATS", 1)
    monkeypatch.setattr(profile, "TOKENS", (1, 8))
    assert cost_of(engine_of(model, "ngram"), "cached").tokens.x == (1, 8)
    assert "cannot be kept" in caplog.text
