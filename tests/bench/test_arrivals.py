from __future__ import annotations

import itertools
import statistics

import pytest

from paceline.bench.arrivals import poisson_offsets


@pytest.mark.parametrize("rate", [0.5, 4.0, 100.0])
def test_gaps_are_exponential_with_mean_one_over_rate(rate: float) -> None:
    offsets = poisson_offsets(rate, 20_000, seed=1)
    gaps = [b - a for a, b in itertools.pairwise((0.0, *offsets))]
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.03)
    # An exponential's standard deviation equals its mean; regular arrivals would have 0.
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.05)


def test_a_seed_fixes_them_and_longer_runs_begin_alike() -> None:
    assert poisson_offsets(2.0, 50, seed=3)[:20] == poisson_offsets(2.0, 20, seed=3)
    assert poisson_offsets(2.0, 20, seed=3) != poisson_offsets(2.0, 20, seed=4)
