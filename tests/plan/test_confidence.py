"""What a drafter's confidence is worth is learnt, whatever its scale."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.confidence import Confidence
from paceline.plan.survival import MOST, TENTHS, Survival


def taught(truth: dict[float, float], trials: int = 4000) -> Confidence:
    """truth: acceptance of first drafts by what the drafter claims."""
    rng, known = random.Random(0), Confidence()
    for _ in range(trials):
        sure = rng.choice(list(truth))
        known.observe(0, sure, lean=1.0, hit=rng.random() < truth[sure])
        known.refresh()
    return known


def test_a_drafter_that_boasts_is_seen_through() -> None:
    known = taught({0.95: 0.5, 0.55: 0.2, 0.05: 0.01})
    survival = known.known
    assert survival.chance(0, 0.95, 1.0) == pytest.approx(0.5, abs=0.1)
    assert survival.chance(0, 0.55, 1.0) == pytest.approx(0.2, abs=0.08)
    assert survival.chance(0, 0.05, 1.0) < 0.06


def test_reliability_counts_what_was_expected_against_what_came() -> None:
    tenths = taught({0.95: 0.5, 0.05: 0.05}).reliability()
    assert sum(each.drafts for each in tenths) == 4000
    busy = [each for each in tenths if each.drafts > 800]
    assert busy[0] is tenths[0] and len(busy) > 1
    for each in busy:
        assert each.expected / each.drafts == pytest.approx(each.accepted / each.drafts, abs=0.08)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_more_confidence_never_means_less_trust(seen: list[tuple[float, bool]]) -> None:
    known = Confidence()
    for sure, hit in seen:
        known.observe(0, sure, lean=1.0, hit=hit)
    known.refresh()
    trust = known.known.trust
    assert len(trust) == len(TENTHS)
    assert all(0 <= a <= b <= MOST for a, b in itertools.pairwise(trust))


def test_deeper_drafts_may_be_worse_than_they_claim() -> None:
    rng, known = random.Random(1), Confidence()
    for _ in range(1500):
        known.observe(0, 0.75, lean=1.0, hit=rng.random() < 0.75)
        known.observe(2, 0.75, lean=1.0, hit=rng.random() < 0.3)
        known.refresh()
    survival = known.known
    assert survival.chance(2, 0.75, 1.0) < 0.65 * survival.chance(0, 0.75, 1.0)


def test_what_is_not_seen_drifts_back_to_what_the_drafter_says() -> None:
    known = taught({0.85: 0.0}, 200)
    assert known.known.chance(0, 0.85, 1.0) < 0.15
    for _ in range(4000):
        known.fade()
    known.refresh()
    assert known.known.trust[8] > 0.6


def test_the_spread_of_survival() -> None:
    known = Confidence()
    for i in range(1000):
        known.proposed((0.95, 0.95) if i % 4 else (0.05, 0.05))
    known.refresh()
    first, second = known.known.spread
    assert [share for share, _ in first] == pytest.approx([0.75, 0.25], abs=0.02)
    assert [alive for _, alive in first] == pytest.approx([0.95, 0.05], abs=0.01)
    assert [alive for _, alive in second] == pytest.approx([0.9025, 0.0025], abs=0.01)
    assert Survival(spread=(first,)).classes(2)[0] == first


@given(
    st.lists(st.floats(0, 1), max_size=8), st.floats(0.1, 2), st.data(),
)  # fmt: skip
def test_a_childs_survival_is_below_its_parents(
    sure: list[float], lean: float, data: st.DataObject
) -> None:
    parents = [data.draw(st.integers(0, j)) for j in range(len(sure))]
    alive = [1.0, *Survival().paths(sure, parents, lean=lean)]
    assert all(alive[j + 1] <= MOST * alive[parent] for j, parent in enumerate(parents))
