"""The metrics page: what the engine last said and what the HTTP side counted."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from paceline.serve.metrics import Metrics
from paceline.types import EngineStats


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
