"""The metrics page: what the engine last said and what the HTTP side counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from paceline.serve.metrics import Metrics
from paceline.types import (
    EngineStats,
    PredictionStats,
    ReliabilityStats,
    ShapeStats,
    SpeculationStats,
)


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, label value or "") to value."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found[sample.name, next(iter(sample.labels.values()), "")] = sample.value
    return found


def test_engine_figures_are_read_when_asked() -> None:
    stats = EngineStats()
    metrics = Metrics(lambda: stats)
    assert samples(metrics)["paceline_requests_running", ""] == 0
    stats = EngineStats(
        running=1,
        waiting=2,
        pages_total=30,
        pages_free=4,
        pages_cached=5,
        steps_total=6,
        step_seconds_total=7.5,
        prompt_tokens_total=8,
        cached_prompt_tokens_total=9,
        committed_tokens_total=10,
        preemptions_total=11,
        finished_total=12,
    )
    got = samples(metrics)
    expected = {
        ("paceline_requests_running", ""): 1,
        ("paceline_requests_waiting", ""): 2,
        ("paceline_kv_pages", "used"): 21,
        ("paceline_kv_pages", "free"): 4,
        ("paceline_kv_pages", "cached"): 5,
        ("paceline_steps_total", ""): 6,
        ("paceline_step_seconds_total", ""): 7.5,
        ("paceline_prompt_tokens_total", ""): 8,
        ("paceline_cached_prompt_tokens_total", ""): 9,
        ("paceline_committed_tokens_total", ""): 10,
        ("paceline_preemptions_total", ""): 11,
        ("paceline_finished_choices_total", ""): 12,
    }
    assert {key: got[key] for key in expected} == expected


def shape(steps: int, *, depth: int = 3, branching: int = 1, reason: str = "r") -> ShapeStats:
    return ShapeStats(
        depth=depth,
        branching=branching,
        reason=reason,
        steps=steps,
        committed=0,
        drafted=0,
        accepted=0,
    )


def test_how_speculation_goes() -> None:
    said = SpeculationStats(
        depth=3,
        branching=2,
        budget=18,
        reason="few requests",
        attempts=(10, 8, 5),
        accepted=(7, 4, 0),
        shapes=(shape(6, branching=2, reason="few requests"), shape(4, depth=0, reason="many")),
        suspect=True,
    )
    metrics = Metrics(lambda: EngineStats(drafter_failures_total=2, speculation=said))
    got = samples(metrics)
    for position, (attempts, accepted) in {"1": (10, 7), "2": (8, 4), "3": (5, 0)}.items():
        assert got["paceline_draft_attempts_total", position] == attempts
        assert got["paceline_draft_accepted_total", position] == accepted
    assert got["paceline_speculation_depth", ""] == 3
    assert got["paceline_speculation_budget", ""] == 18
    assert got["paceline_drafter_suspect", ""] == 1
    assert got["paceline_drafter_failures_total", ""] == 2
    name = "paceline_speculation_steps_total"
    page = metrics.text().decode()
    assert f'{name}{{branching="2",depth="3",reason="few requests"}} 6.0' in page
    assert f'{name}{{branching="1",depth="0",reason="many"}} 4.0' in page
    assert f"# TYPE {name} counter" in page
    assert "# TYPE paceline_draft_attempts_total counter" in page


def test_predicted_times_and_reliability() -> None:
    errors = (3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1)
    said = SpeculationStats(
        prediction=PredictionStats(
            steps=6, predicted_seconds=0.6, real_seconds=0.9, errors=errors, error_sum=2.5
        ),
        reliability=(
            ReliabilityStats(drafts=20, expected=1.0, accepted=2),
            ReliabilityStats(drafts=10, expected=1.5, accepted=1),
        ),
    )
    page = Metrics(lambda: EngineStats(speculation=said)).text().decode()
    for line in (
        "paceline_predicted_step_seconds_total 0.6",
        "paceline_foretold_step_seconds_total 0.9",
        'paceline_step_prediction_error_bucket{le="0.01"} 3.0',
        'paceline_step_prediction_error_bucket{le="1.0"} 5.0',
        'paceline_step_prediction_error_bucket{le="+Inf"} 6.0',
        "paceline_step_prediction_error_sum 2.5",
        'paceline_reliability_drafts_total{expected="0.1"} 10.0',
        'paceline_reliability_expected_total{expected="0.0"} 1.0',
        'paceline_reliability_accepted_total{expected="0.0"} 2.0',
    ):
        assert line in page.splitlines()


def test_before_the_first_step_nothing_was_drafted() -> None:
    got = samples(Metrics(EngineStats))
    assert got["paceline_speculation_depth", ""] == got["paceline_drafter_suspect", ""] == 0
    assert not [name for name, _ in got if name.startswith("paceline_draft_a")]


@given(st.lists(st.text(), unique=True, max_size=4))
def test_a_reason_is_any_text(reasons: list[str]) -> None:
    """As a label it comes out as it went in: quotes, line breaks and backslashes included."""
    shapes = tuple(shape(number, reason=reason) for number, reason in enumerate(reasons))
    metrics = Metrics(lambda: EngineStats(speculation=SpeculationStats(shapes=shapes)))
    found = {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name == "paceline_speculation_steps_total"
    }
    assert found == {reason: number for number, reason in enumerate(reasons)}


def test_http_figures() -> None:
    metrics = Metrics(EngineStats)
    metrics.count(200)
    metrics.count(200)
    metrics.count(429)
    metrics.aborts.inc()
    metrics.time_to_first_token.observe(0.2)
    metrics.inter_token.observe(0.01)
    metrics.request_seconds.observe(3)
    got = samples(metrics)
    assert got["paceline_requests_total", "200"] == 2
    assert got["paceline_requests_total", "429"] == 1
    assert got["paceline_request_aborts_total", ""] == 1
    for name in ("time_to_first_token", "inter_token", "request"):
        assert got[f"paceline_{name}_seconds_count", ""] == 1


def test_two_servers_in_one_process_do_not_share_counts() -> None:
    first, second = Metrics(EngineStats), Metrics(EngineStats)
    first.count(200)
    assert ("paceline_requests_total", "200") not in samples(second)
