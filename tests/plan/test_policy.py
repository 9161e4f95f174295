from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.plan.policy import Off, Schedule, SpeculationPolicy, Static, Threshold
from paceline.plan.step import PLAIN, Load, RequestShape

CHAIN = RequestShape.chain(3)


def depths(policy: SpeculationPolicy, decodes: tuple[int, ...]) -> list[int]:
    found = []
    for count in decodes:
        load = Load(running=count, decodes=count, prefill_tokens=7, context_tokens=100, waiting=0)
        choice = policy.choose(load)
        assert choice.reason
        assert choice.shape.budget == choice.shape.depth * count
        found.append(choice.shape.depth)
    return found


def test_each_policy_by_load() -> None:
    counts = (0, 1, 4, 5, 6, 16, 17, 600)
    assert depths(Off(), counts) == [0] * 8
    assert depths(Static(CHAIN), counts) == [0, 3, 3, 3, 3, 3, 3, 3]
    assert depths(Threshold(CHAIN, 5), counts) == [0, 3, 3, 3, 0, 0, 0, 0]
    schedule = Schedule.parse([[1, 4, 5], [5, 16, 3], [17, 512, 0]])
    assert depths(schedule, counts) == [0, 5, 5, 3, 3, 3, 0, 0]


def test_requests_in_their_prompt_count_as_running() -> None:
    load = Load(running=6, decodes=3, prefill_tokens=90, context_tokens=9, waiting=4)
    assert Threshold(CHAIN, 5).choose(load).shape is PLAIN
    assert Threshold(CHAIN, 6).choose(load).shape.budget == 9
    assert Schedule.parse([[1, 5, 3], [6, 9, 0]]).choose(load).shape is PLAIN


def test_no_decodes_is_plain() -> None:
    load = Load(running=1, decodes=0, prefill_tokens=7, context_tokens=0, waiting=0)
    assert Static(CHAIN).choose(load).shape is PLAIN


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "empty"),
        ([[1, 4, 5], [6, 9, 1]], "gap"),
        ([[2, 4, 5]], "gap"),
        ([[1, 4, 5], [4, 9, 1]], "overlaps"),
        ([[1, 0, 5]], "empty or has negative"),
        ([[1, 4, -1]], "negative"),
        ([[1, 4]], "must be"),
        ([[1, 4, "3"]], "must be"),
        ([[1, 4, True]], "must be"),
    ],
)
def test_schedules_that_make_no_sense(rows: list[list[int]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Schedule.parse(rows)
