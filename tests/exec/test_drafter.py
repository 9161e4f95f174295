"""Drafts compete for their places: what is verified of what is proposed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.pool import PagePool
from paceline.exec.drafter import UNSURE, Drafts, walked
from paceline.plan.step import NOTHING, Choice, DraftShape, Row, StepPlan

SURE = st.floats(0, 1)


def plan_of(leans: list[float], *, budget: int, floor: float = 0.0, width: int = 63) -> StepPlan:
    return StepPlan(
        rows=tuple(
            Row(slot=i, generation=1, start=9, drafts=width, lean=lean)
            for i, lean in enumerate(leans)
        ),
        choice=Choice(shape=DraftShape(depth=4, budget=budget), reason="", floor=floor),
        reservation=PagePool(1, 1).reserve({}),
    )


@st.composite
def forests(draw: st.DrawFn) -> tuple[Drafts, list[float]]:
    rows = draw(st.integers(1, 5))
    sizes = [draw(st.integers(0, 7)) for _ in range(rows)]
    return Drafts(
        tokens=tuple(tuple(range(100 * r, 100 * r + size)) for r, size in enumerate(sizes)),
        parents=tuple(tuple(draw(st.integers(0, j)) for j in range(size)) for size in sizes),
        confidence=tuple(tuple(draw(SURE) for _ in range(size)) for size in sizes),
    ), [draw(st.sampled_from([0.1, 1.0, 1.7])) for _ in range(rows)]


@given(forests(), st.integers(1, 20), st.sampled_from([0.0, 0.01, 0.3, 0.9]))
def test_the_most_likely_are_verified(
    proposed: tuple[Drafts, list[float]], budget: int, floor: float
) -> None:
    drafts, leans = proposed
    plan = plan_of(leans, budget=budget, floor=floor)
    kept = drafts.best(plan)
    paths = plan.load.survival.paths
    survival = {
        token: alive
        for tokens, parents, sure, lean in zip(
            drafts.tokens, drafts.parents, drafts.confidence, leans, strict=True
        )
        for token, alive in zip(tokens, paths(sure, parents, lean=lean), strict=True)
    }
    chosen = {token for row in kept.tokens for token in row}
    assert len(chosen) == min(budget, sum(alive >= floor for alive in survival.values()))
    worst = min((survival[token] for token in chosen), default=1.0)
    assert worst >= floor
    assert all(alive <= worst for token, alive in survival.items() if token not in chosen) or (
        len(chosen) < budget
    )
    for row, (tokens, parents, sure) in enumerate(
        zip(kept.tokens, kept.parents, kept.confidence, strict=True)
    ):
        assert list(tokens) == sorted(tokens)
        for j, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            before = drafts.tokens[row].index(token)
            assert sure[j] == drafts.confidence[row][before]
            old_parent = drafts.parents[row][before]
            assert parent <= j
            if old_parent:
                assert tokens[parent - 1] == drafts.tokens[row][old_parent - 1]
            else:
                assert parent == 0


def test_what_fits_is_verified_as_it_is() -> None:
    drafts = Drafts.chains([(1, 2), ()], [(0.1, 0.1), ()])
    assert drafts.best(plan_of([1.0, 1.0], budget=2)) is drafts


def test_a_drafter_need_not_say_how_sure_it_is() -> None:
    plan = plan_of([1.0, 1.0], budget=9)
    assert Drafts.chains([(1, 2), ()]).within(plan, 10).confidence == ((UNSURE, UNSURE), ())


@pytest.mark.parametrize("sure", [(0.5,), (0.5, 1.5), (0.5, float("nan"))])
def test_confidence_is_a_share_of_one_for_each_draft(sure: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        Drafts.chains([(1, 2)], [sure]).within(plan_of([1.0], budget=9), 10)


def test_the_walk_tells_whose_children_were_tried() -> None:
    parents, sure = (0, 0, 1, 1, 3), (0.5, 0.4, 0.3, 0.2, 0.1)
    assert walked(parents, sure, (1, 3)) == (((0.5, 0.4), 1), ((0.3, 0.2), 1), ((0.1,), 0))
    assert walked(parents, sure, ()) == (((0.5, 0.4), 0),)
    assert walked((), (), ()) == ()
    assert NOTHING.survival.paths(sure, parents, lean=1.0)[4] < 0.1
