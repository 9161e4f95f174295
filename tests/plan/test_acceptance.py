"""What is learnt of acceptance comes near the truth, by position, rank and request."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.acceptance import Acceptance
from paceline.plan.step import RowResult
from paceline.plan.survival import GUESS, Survival


def outcome(rng: random.Random, depth: int, rate: float) -> RowResult:
    """A chain of `depth` drafts, each accepted with this probability."""
    walk = []
    for _ in range(depth):
        walk.append(((0.5,), int(rng.random() < rate)))
        if not walk[-1][1]:
            break
    hits = sum(rank for _, rank in walk)
    return RowResult(
        tokens=tuple(range(hits + 1)), levels=(1,) * depth, walk=tuple(walk),
        proposed=(0.5,) * depth,
    )  # fmt: skip


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_rates_by_position(rate: float) -> None:
    rng, known = random.Random(0), Acceptance()
    for _ in range(3000):
        known.observe("a", 3, outcome(rng, 3, rate))
    known.refresh()
    survival = known.snapshot([1.0])
    assert survival.rates[0] == pytest.approx(rate, abs=0.08)
    assert survival.of(1.0)[1] == pytest.approx(rate**2, abs=0.1)
    assert survival.offered == pytest.approx(1.0)
    assert survival.groups == ((1.0, 1),)


def test_requests_are_told_apart_shrunk_and_forgiven() -> None:
    rng, known = random.Random(0), Acceptance()
    for _ in range(60):
        known.observe("good", 2, outcome(rng, 2, 0.9))
        known.observe("bad", 2, outcome(rng, 2, 0.1))
    known.refresh()
    assert known.lean("bad") < 0.7 < 1.1 < known.lean("good")
    assert known.lean("new") == 1.0
    bad = known.lean("bad")
    for _ in range(600):
        known.fade()
    known.refresh()
    assert known.lean("bad") > bad
    known.forget("good")
    assert known.lean("good") == 1.0
    groups = dict(known.snapshot([known.lean(k) for k in ("bad", "new", "other")]).groups)
    assert sum(groups.values()) == 3 and groups[1.0] >= 2


def test_ranks_of_trees_and_what_is_not_offered() -> None:
    rng, known = random.Random(1), Acceptance()
    for _ in range(4000):
        rank = rng.choices((1, 2, 3, 0), (0.5, 0.2, 0.1, 0.2))[0]
        sure = (0.6, 0.3, 0.1)
        tree = RowResult(tokens=(1,), levels=(3,), walk=((sure, rank),), proposed=sure)
        known.observe("a", 3, tree)
        known.observe("b", 3, RowResult(tokens=(1,)))  # it might have drafted and did not
        known.observe("c", 0, RowResult(tokens=(1,)))  # it might not
    known.refresh()
    survival = known.snapshot([])
    assert survival.ranks[:3] == pytest.approx((0.5, 0.2, 0.1), abs=0.06)
    assert survival.offered == pytest.approx(0.5, abs=0.05)
    assert survival.rates[0] == pytest.approx(0.8, abs=0.06)


@settings(deadline=None, max_examples=20)
@given(st.floats(0.2, 1.5))
def test_what_drafts_bring_against_what_was_expected_is_learnt_and_forgotten(share: float) -> None:
    known = Acceptance()
    assert known.snapshot([]).kept == 1.0
    rng = random.Random(2)
    for _ in range(2000):
        known.gained(rng.random() < 0.5 * share, 0.5)
        known.fade()
    known.refresh()
    assert known.snapshot([]).kept == pytest.approx(share, abs=0.25)
    for _ in range(5000):
        known.fade()
    known.refresh()
    assert known.snapshot([]).kept == pytest.approx(1.0, abs=0.06)


def test_a_few_steps_of_large_promises_do_not_swing_what_is_kept() -> None:
    known = Acceptance()
    for _ in range(300):
        known.gained(30, 30.0)
        known.fade()
    for _ in range(5):
        known.gained(0, 30.0)
        known.fade()
    known.refresh()
    assert known.snapshot([]).kept > 0.8


def test_a_change_of_workload_shows_after_a_few_probes_and_nothing_fades_to_a_guess() -> None:
    known = Acceptance()
    bad, good = (RowResult(tokens=(1,), walk=(((0.5,), rank),), proposed=(0.5,)) for rank in (0, 1))
    for _ in range(400):
        known.observe("a", 1, bad)
        known.fade()
    known.refresh()
    before = known.snapshot([]).rates
    assert before[0] < 0.02 and before[3] < 0.05  # positions not seen lately are as the first
    for _ in range(5000):
        known.fade()
    known.refresh()
    assert known.snapshot([]).rates[0] == pytest.approx(before[0])
    for _ in range(20):  # a probe every eighth step
        known.observe("a", 1, good)
        for _ in range(8):
            known.fade()
    known.refresh()
    assert known.snapshot([]).rates[0] > 0.7


def test_a_choice_counts_on_what_drafts_have_kept() -> None:
    assert Survival(offered=0.5, kept=0.8).worth == pytest.approx(0.4)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 2))
def test_survival_never_rises(rates: list[float], lean: float) -> None:
    found = Survival(rates=tuple(rates)).of(lean)
    assert all(0 <= b <= a < 1 for a, b in itertools.pairwise(found))


def test_nothing_known_is_a_guess() -> None:
    assert Acceptance().snapshot([]).rates[0] == GUESS
