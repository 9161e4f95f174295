"""Errors of predicted step times: counts, sums and quantiles."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sched.prediction import PredictionErrors
from paceline.types import ERROR_BOUNDS

ratios = st.lists(st.floats(0.2, 3.0), min_size=1, max_size=12)  # so few weigh nearly alike


@given(ratios)
def test_quantiles_lie_in_the_bucket_of_the_real_ones(real: list[float]) -> None:
    errors = PredictionErrors()
    for ratio in real:
        errors.observe(2.0, 2.0 * ratio)
    stats = errors.stats()
    assert stats.steps == sum(stats.errors) == len(real)
    assert stats.real_seconds == pytest.approx(2 * sum(real))
    found = sorted(abs(ratio - 1) for ratio in real)
    assert stats.error_sum == pytest.approx(sum(found))
    assert stats.median is not None and stats.p90 is not None
    low, high = statistics.median_low(found), statistics.median_high(found)
    assert stats.median <= next((b for b in ERROR_BOUNDS if b >= high + 1e-9), ERROR_BOUNDS[-1])
    assert stats.median >= max((b for b in (0.0, *ERROR_BOUNDS) if b < low - 1e-9), default=0.0)
    assert stats.median <= stats.p90


def test_recent_errors_weigh_more() -> None:
    errors = PredictionErrors()
    for _ in range(2000):
        errors.observe(1.0, 1.4)
    for _ in range(30000):
        errors.observe(1.0, 1.005)
    stats = errors.stats()
    assert stats.median is not None and stats.median < 0.01
    assert stats.p90 is not None and stats.p90 <= 0.01
    assert stats.errors[0] == 30000


def test_nothing_is_known_before_the_first_step() -> None:
    stats = PredictionErrors().stats()
    assert stats.median is None and stats.p90 is None and not sum(stats.errors)
