"""Cost tables are monotone whatever was measured; the pace follows the machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.cost import ROUGH, CostTable, Curve, Pace, PaceKeeper

POINTS = st.lists(
    st.tuples(st.integers(1, 500), st.floats(1e-5, 2.0)), min_size=1, max_size=20
)  # fmt: skip


@given(POINTS, st.floats(0, 2000), st.floats(0, 2000))
def test_a_curve_never_falls(points: list[tuple[int, float]], a: float, b: float) -> None:
    curve = Curve.through(points)
    low, high = sorted((a, b))
    assert curve(low) <= curve(high) + 1e-12
    for x, y in points:
        assert curve(x) >= y * (1 - 1e-9) or any(x == other and y > z for other, z in points)


def test_between_and_beyond_its_points() -> None:
    curve = Curve.through([(10, 2.0), (1, 1.0), (20, 4.0), (10, 3.0)])
    assert [curve(x) for x in (0, 1, 5.5, 10, 15, 20, 30)] == [1, 1, 1.5, 2, 3, 4, 6]
    assert Curve.through([(4, 7.0)])(100) == 7.0


def test_what_a_step_costs() -> None:
    table = CostTable(
        tokens=Curve.through([(1, 1.0), (11, 2.0)]),
        context=Curve.through([(1, 0.001), (4, 0.002)]),
        level=Curve.through([(1, 0.1), (3, 0.3)]),
        proposal=0.5,
    )
    assert table.step(1, 1, 0) == 1.0
    assert table.step(11, 11, 1000) == 3.0
    assert table.step(4, 1, 1000) == pytest.approx(1.3 + 2.0)
    assert table.drafting(()) == table.drafting((0,)) == 0.0
    assert table.drafting((1, 3)) == pytest.approx(0.9)


@given(st.floats(0.2, 5.0), st.lists(st.integers(1, 1000), min_size=1, max_size=5))
def test_the_pace_finds_a_machine_that_is_slower_or_faster(slower: float, sizes: list[int]) -> None:
    keeper = PaceKeeper()
    for _ in range(400):
        for tokens in sizes:
            keeper.observe(tokens, 1.0, slower)
    pace = keeper.snapshot()
    for tokens in (*sizes, 3, 77):
        assert pace.factor(tokens) == pytest.approx(slower, rel=0.1)


def test_one_accident_changes_little_and_one_size_is_told_apart() -> None:
    keeper = PaceKeeper()
    keeper.observe(4, 1.0, 1000.0)
    assert keeper.snapshot().overall < 1.2
    keeper = PaceKeeper()
    for _ in range(600):
        keeper.observe(4, 1.0, 1.0)
        keeper.observe(64, 1.0, 1.2)
    pace = keeper.snapshot()
    assert pace.factor(64) / pace.factor(4) == pytest.approx(1.2, rel=0.02)


def test_pace_one_is_the_table() -> None:
    assert Pace().factor(17) == 1.0
    assert ROUGH.step(8, 8, 0) > ROUGH.step(1, 1, 0)
