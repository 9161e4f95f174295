"""Combinations of flags that make no sense are one clear line; those that do are resolved."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.plan.adaptive import Adaptive
from paceline.plan.cost import ROUGH
from paceline.plan.policy import Off, Schedule, Static, Threshold, policy_of
from paceline.plan.step import RequestShape

NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
EAGLE: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "drafter",
}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculative_algorithm": "MEDUSA"}, "--speculative-algorithm must be one of"),
        ({"speculative_algorithm": "EAGLE3"}, "EAGLE3 needs --speculative-draft-model-path"),
        (NGRAM | {"speculative_draft_model_path": "x"}, "read with --speculative-algorithm EAGLE3"),
        (NGRAM | {"speculative_eagle_topk": 4}, "read with --speculative-algorithm EAGLE3"),
        (NGRAM | {"speculative_draft_layer_ids": "output"}, "algorithm EAGLE3 only"),
        (
            NGRAM | {"speculative_policy": "static", "speculative_max_draft_tokens": 9},
            "--speculative-policy adaptive only",
        ),
        (NGRAM | {"speculative_max_draft_tokens": 0}, "must be at least 1"),
        ({"profile": "never"}, "--profile must be one of"),
        ({"speculative_num_steps": 3}, "algorithm NGRAM or EAGLE3 only"),
        ({"speculative_num_draft_tokens": 3}, "algorithm NGRAM or EAGLE3 only"),
        (EAGLE | {"speculative_eagle_topk": 0}, "topk must be 1 to 8, not 0"),
        (EAGLE | {"speculative_eagle_topk": 9}, "topk must be 1 to 8, not 9"),
        (EAGLE | {"speculative_num_steps": 9}, "steps must be 1 to 8, not 9"),
        (EAGLE | {"speculative_num_draft_tokens": 64}, "tokens must be 1 to 63, not 64"),
        (NGRAM | {"speculative_num_draft_tokens": 5}, "more than the 3 candidates"),
        (
            EAGLE | {"speculative_num_steps": 5, "speculative_num_draft_tokens": 4},
            "cannot fill --speculative-num-steps 5",
        ),
        (
            EAGLE | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 11},
            "more than the 10 candidates of 3 steps with topk 2",
        ),
        ({"speculative_policy": "threshold", "speculative_disable_batch_threshold": 5}, "drafter"),
        (NGRAM | {"speculative_policy": "threshold"}, "needs --speculative-disable-batch"),
        (NGRAM | {"speculative_disable_batch_threshold": 5}, "--speculative-policy threshold only"),
        (NGRAM | {"speculative_policy": "schedule"}, "needs --speculative-schedule"),
        (
            NGRAM
            | {
                "speculative_policy": "schedule",
                "speculative_schedule": "[[1,4,3]]",
                "speculative_num_steps": 3,
            },
            "not read with a schedule of chains",
        ),
        ({"memory_fraction": 0.0}, "--memory-fraction must be above 0"),
        ({"memory_fraction": 1.5}, "--memory-fraction must be above 0"),
        ({"memory_fraction": 0.5, "kv_tokens": 64}, "not read with --kv-tokens"),
        ({"cuda_graph_max_tokens": -1}, "--cuda-graph-max-tokens must be 0 or more"),
        ({"synthetic_acceptance": 0.5}, "--synthetic-acceptance is read with"),
        (NGRAM | {"synthetic_acceptance": 1.5}, "--synthetic-acceptance must be 0 to 1"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        EngineConfig(**options)
    assert "\n" not in str(caught.value)


def test_every_algorithm_has_a_drafter_and_every_policy_is_known() -> None:
    from paceline.config import ALGORITHMS, POLICIES
    from paceline.exec.drafters import DRAFTERS

    assert set(DRAFTERS) == set(ALGORITHMS)
    needs: dict[str, dict[str, Any]] = {
        "threshold": {"speculative_disable_batch_threshold": 2},
        "schedule": {"speculative_schedule": "[[1,2,3]]"},
    }
    for name in POLICIES:
        config = EngineConfig(**NGRAM, speculative_policy=name, **needs.get(name, {}))
        assert type(policy_of(config)).__name__.lower() == name


def test_fewer_tokens_than_the_usual_steps_are_fewer_steps() -> None:
    config = EngineConfig(**EAGLE, speculative_num_draft_tokens=2, speculative_policy="static")
    assert policy_of(config) == Static(RequestShape(depth=2, branching=1, drafts=2))


def test_what_the_flags_mean() -> None:
    assert policy_of(EngineConfig()) == Off()
    assert policy_of(EngineConfig(**EAGLE, speculative_policy="off")) == Off()
    adaptive = policy_of(EngineConfig(**NGRAM, speculative_max_draft_tokens=40))
    assert adaptive == Adaptive(ROUGH, RequestShape.chain(3), budget=40)
    always = EngineConfig(**NGRAM, speculative_policy="static")
    assert policy_of(always) == Static(RequestShape.chain(3))
    tree = EngineConfig(**EAGLE, speculative_eagle_topk=4, speculative_policy="static")
    assert policy_of(tree) == Static(RequestShape(depth=3, branching=4, drafts=12))
    story = EngineConfig(
        **EAGLE,
        speculative_eagle_topk=4,
        speculative_num_draft_tokens=16,
        speculative_policy="threshold",
        speculative_disable_batch_threshold=5,
    )
    assert policy_of(story) == Threshold(RequestShape(depth=3, branching=4, drafts=16), 5)
    chains = EngineConfig(
        **NGRAM, speculative_policy="schedule", speculative_schedule="[[1,4,5],[5,9,0]]"
    )
    assert policy_of(chains) == Schedule(
        ((1, 4, RequestShape.chain(5)), (5, 9, RequestShape.chain(0)))
    )
    trees = EngineConfig(
        **EAGLE,
        speculative_eagle_topk=2,
        speculative_policy="schedule",
        speculative_schedule="[[1,4,9],[5,9,2]]",
    )
    assert policy_of(trees) == Schedule(
        (
            (1, 4, RequestShape(depth=3, branching=2, drafts=9)),
            (5, 9, RequestShape(depth=2, branching=2, drafts=2)),
        )
    )


@pytest.mark.parametrize("schedule", ["[[1,4,9]]", "no", "[[1,4]]", '[[1,4,"3"]]', "[]"])
def test_schedules_that_make_no_sense(schedule: str) -> None:
    config = EngineConfig(**NGRAM, speculative_policy="schedule", speculative_schedule=schedule)
    with pytest.raises(ConfigError, match="schedule"):
        policy_of(config)
