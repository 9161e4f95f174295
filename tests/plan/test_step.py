import dataclasses

import pytest

from paceline.cache.pool import PagePool
from paceline.plan.policy import Off
from paceline.plan.step import PLAIN, DraftShape, Load, Row, RowResult, StepPlan, StepResult


def test_depth_zero_is_plain_and_has_no_budget() -> None:
    assert DraftShape() == PLAIN
    for wrong in ({"depth": 0, "budget": 3}, {"depth": 2, "budget": 0}, {"branching": 0}):
        with pytest.raises(AssertionError):
            DraftShape(**wrong)


def test_a_row_without_tokens_stands_for_the_slots_last_one() -> None:
    assert Row(slot=0, generation=1, start=5).given == 1
    assert Row(slot=0, generation=1, start=5, tokens=(1, 2, 3)).given == 3


def test_accepted_drafts_are_the_committed_tokens_but_the_bonus() -> None:
    assert [RowResult(tokens=t).accepted for t in ((), (1,), (1, 2, 3))] == [0, 0, 2]


def test_plans_are_frozen_and_results_answer_every_row() -> None:
    load = Load(running=2, decodes=1, prefill_tokens=0, context_tokens=5, waiting=0)
    choice = Off().choose(load)
    assert choice.shape is PLAIN and choice.reason
    row = Row(slot=0, generation=1, start=5)
    plan = StepPlan(rows=(row,), choice=choice, reservation=PagePool(1, 1).reserve({}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rows = ()  # type: ignore[misc]
    with pytest.raises(AssertionError):
        StepResult(plan=plan, rows=(), seconds=0.0)
