"""Drafts are counted by position and by shape, and never past a request's end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.pool import PagePool
from paceline.plan.step import PLAIN, Choice, DraftShape, RowResult, StepPlan, StepResult
from paceline.sched.counters import SUSPECT_ATTEMPTS, Counters


def step(counters: Counters, shape: DraftShape = PLAIN, reason: str = "test") -> None:
    plan = StepPlan(
        rows=(),
        choice=Choice(shape=shape, reason=reason),
        reservation=PagePool(1, 1).reserve({}),
    )
    counters.step(StepResult(plan=plan, rows=(), seconds=0.5))


def test_what_is_past_the_end_counts_as_nothing() -> None:
    counters = Counters()
    step(counters, DraftShape(depth=3, branching=2, budget=6))
    done = RowResult(tokens=(5, 6, 7, 8), levels=(2, 3, 1))  # three accepted, one bonus
    assert counters.row(done, 4, ended=False) == (6, 3)
    assert counters.row(done, 2, ended=True) == (5, 2)  # ended at the second accepted one
    assert counters.row(done, 1, ended=True) == (2, 1)
    assert counters.row(RowResult(tokens=(5,), levels=(2, 3, 1)), 1, ended=True) == (2, 0)
    said = counters.speculation()
    assert said.attempts == (4, 2, 1) and said.accepted == (3, 2, 1)
    assert (counters.drafted, counters.accepted, counters.committed) == (15, 6, 8)
    (shape,) = said.shapes
    assert (shape.steps, shape.drafted, shape.accepted, shape.committed) == (1, 15, 6, 8)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 4), max_size=5),
            st.integers(0, 5),
            st.integers(1, 6),
            st.booleans(),
        )
    )
)
def test_sums_agree(rows: list[tuple[list[int], int, int, bool]]) -> None:
    counters = Counters()
    drafted = accepted = 0
    for levels, hits, taken, ended in rows:
        step(counters, reason=str(len(levels)))
        hits = min(hits, len(levels))
        done = RowResult(tokens=tuple(range(hits + 1)), levels=tuple(levels))
        taken = min(taken, hits + 1) if ended else hits + 1
        more = counters.row(done, taken, ended=ended)
        drafted, accepted = drafted + more[0], accepted + more[1]
        assert more[1] <= taken and more[1] <= len(levels)
    said = counters.speculation()
    assert (counters.drafted, counters.accepted) == (drafted, accepted)
    assert sum(said.accepted) == accepted
    assert all(a <= b for a, b in zip(said.accepted, said.attempts, strict=True))
    assert list(said.attempts) == sorted(said.attempts, reverse=True)
    assert all(0 <= share <= 1 for share in said.recent)
    assert sum(shape.drafted for shape in said.shapes) == drafted
    assert sum(shape.steps for shape in said.shapes) == counters.steps == len(rows)


def test_a_drafter_that_is_never_right_is_suspect_until_it_is() -> None:
    counters = Counters()
    step(counters, DraftShape(depth=1, budget=1))
    wrong, right = RowResult(tokens=(1,), levels=(1,)), RowResult(tokens=(1, 2), levels=(1,))
    for _ in range(SUSPECT_ATTEMPTS - 1):
        counters.row(wrong, 1, ended=False)
    assert not counters.suspect
    counters.row(wrong, 1, ended=False)
    assert counters.suspect and counters.speculation().suspect
    for _ in range(5):
        counters.row(right, 2, ended=False)
    assert not counters.suspect


def test_plain_steps_are_recorded_with_their_reason() -> None:
    counters = Counters()
    for reason in ("a", "b", "a"):
        step(counters, reason=reason)
        counters.row(RowResult(tokens=(1,)), 1, ended=False)
    said = counters.speculation()
    assert [(s.reason, s.steps, s.committed) for s in said.shapes] == [("a", 2, 2), ("b", 1, 1)]
    assert said.attempts == () and said.reason == "a" and not said.suspect
