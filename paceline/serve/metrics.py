"""The server's metrics in Prometheus' text format, in a registry of their own.

Engine figures are read from the latest `EngineStats` when somebody asks; those of the HTTP side are
counted as requests go by. Knows nothing of HTTP libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from paceline.types import (
    ERROR_BOUNDS,
    EngineStats,
    PredictionStats,
    ReliabilityStats,
    SpeculationStats,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 5.0)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters and histograms of the HTTP side, plus a view of the engine's figures.

    requests: by HTTP status; 499 is a client that left, 500 also a stream that ended in an error.
    time_to_first_token: arrival to the first text of a request. inter_token: the time since a
    choice's delta before this one, divided by the tokens that this one brought; one value a delta.
    """

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        self.requests = Counter(
            "paceline_requests",
            "Requests for text that have ended, by HTTP status (499: the client left)",
            ["status"],
            registry=self._registry,
        )
        self.aborts = Counter(
            "paceline_request_aborts",
            "Requests dropped because their client left",
            registry=self._registry,
        )
        self.time_to_first_token = Histogram(
            "paceline_time_to_first_token_seconds",
            "Arrival of a request to its first token",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self.inter_token = Histogram(
            "paceline_inter_token_seconds",
            "Time between tokens of one choice",
            buckets=_GAP_BUCKETS,
            registry=self._registry,
        )
        self.request_seconds = Histogram(
            "paceline_request_seconds",
            "Arrival of a request to its end, of those that ended well",
            buckets=_REQUEST_BUCKETS,
            registry=self._registry,
        )

    def count(self, status: int) -> None:
        self.requests.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Turns the engine's latest stats into metric families at the moment of the scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield _gauge("requests_running", "Choices being generated", stats.running)
        yield _gauge("requests_waiting", "Choices waiting for room", stats.waiting)
        pages = GaugeMetricFamily(
            "paceline_kv_pages",
            "Pages of the K/V cache by state; their sum is the whole cache",
            labels=["state"],
        )
        used = stats.pages_total - stats.pages_free - stats.pages_cached
        pages.add_metric(["free"], stats.pages_free)
        pages.add_metric(["cached"], stats.pages_cached)
        pages.add_metric(["used"], used)
        yield pages
        yield _counter("steps", "Engine steps", stats.steps_total)
        yield _counter("step_seconds", "Time spent in engine steps", stats.step_seconds_total)
        yield _counter("prompt_tokens", "Prompt tokens", stats.prompt_tokens_total)
        yield _counter(
            "cached_prompt_tokens",
            "Prompt tokens taken from the prefix cache",
            stats.cached_prompt_tokens_total,
        )
        yield _counter("committed_tokens", "Generated tokens", stats.committed_tokens_total)
        yield _counter("drafted_tokens", "Draft tokens verified", stats.drafted_tokens_total)
        yield _counter("accepted_tokens", "Draft tokens accepted", stats.accepted_tokens_total)
        yield _counter(
            "drafter_failures",
            "Times that the drafter failed; what it failed at went without drafts",
            stats.drafter_failures_total,
        )
        yield _counter(
            "preemptions", "Requests put back for lack of pages", stats.preemptions_total
        )
        yield _counter("finished_choices", "Choices that have ended", stats.finished_total)
        yield from _speculation(stats.speculation)


def _speculation(said: SpeculationStats) -> Iterator[Metric]:
    yield _by_position(
        "draft_attempts", "Rows that carried a draft, by the draft's position", said.attempts
    )
    yield _by_position(
        "draft_accepted", "Rows whose draft was accepted, by the draft's position", said.accepted
    )
    steps = CounterMetricFamily(
        "paceline_speculation_steps",
        "Engine steps by the draft shape that the policy chose, and its reason",
        labels=["depth", "branching", "reason"],
    )
    for shape in said.shapes:
        steps.add_metric([str(shape.depth), str(shape.branching), shape.reason], shape.steps)
    yield steps
    yield _gauge("speculation_depth", "Draft levels of the policy's latest choice", said.depth)
    yield _gauge(
        "speculation_budget", "Draft tokens of a step in the policy's latest choice", said.budget
    )
    yield from _prediction(said.prediction)
    yield from _reliability(said.reliability)
    if said.synthetic_acceptance is not None:
        yield _gauge(
            "synthetic_acceptance",
            "Drafts are accepted by a draw of this probability: what is generated means nothing",
            said.synthetic_acceptance,
        )
    yield _gauge(
        "drafter_suspect",
        "1 when hardly any draft is accepted (under 1 % of the first ones) or the drafter fails",
        said.suspect,
    )


def _prediction(said: PredictionStats) -> Iterator[Metric]:
    yield _counter(
        "predicted_step_seconds",
        "Time that steps should have taken, of those that the policy foretold",
        said.predicted_seconds,
    )
    yield _counter(
        "foretold_step_seconds", "Time that those same steps really took", said.real_seconds
    )
    bounds = (*map(str, ERROR_BOUNDS), "+Inf")
    yield HistogramMetricFamily(
        "paceline_step_prediction_error",
        "Steps by |real / predicted - 1| of their time",
        buckets=list(zip(bounds, accumulate(map(float, said.errors)), strict=True)),
        sum_value=said.error_sum,
    )


def _reliability(tenths: Sequence[ReliabilityStats]) -> Iterator[Metric]:
    """By tenth of the expected acceptance: what was expected, and what came of it."""
    drafts, expected, accepted = (
        CounterMetricFamily(f"paceline_reliability_{name}", text, labels=["expected"])
        for name, text in (
            ("drafts", "Drafts by how likely they were to be accepted"),
            ("expected", "Of those, how many were expected to be accepted"),
            ("accepted", "Of those, how many were accepted"),
        )
    )
    for tenth, each in enumerate(tenths):
        label = [f"{tenth / 10:.1f}"]
        drafts.add_metric(label, each.drafts)
        expected.add_metric(label, each.expected)
        accepted.add_metric(label, each.accepted)
    yield from (drafts, expected, accepted)


def _by_position(name: str, text: str, counts: Sequence[int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"paceline_{name}", text, labels=["position"])
    for position, count in enumerate(counts, start=1):
        family.add_metric([str(position)], count)
    return family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"paceline_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"paceline_{name}", text, value=value)
