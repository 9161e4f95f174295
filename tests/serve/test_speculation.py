"""The body of GET /v1/speculation: every figure in its place, also where there is none."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.serve.speculation import SpeculationInfo, speculation_body
from paceline.types import (
    EngineStats,
    PredictionStats,
    ReliabilityStats,
    ShapeStats,
    SpeculationStats,
)

PLAIN = SpeculationInfo()


def body(info: SpeculationInfo, stats: EngineStats) -> dict[str, Any]:
    """As a client gets it."""
    read = json.loads(msgspec.json.encode(speculation_body(info, stats)))
    assert isinstance(read, dict)
    return read


@pytest.mark.parametrize(
    ("flags", "info"),
    [
        ({}, PLAIN),
        ({"speculative_policy": "static"}, PLAIN),
        ({"speculative_policy": "off"}, PLAIN),
        (
            {"speculative_algorithm": "NGRAM"},
            SpeculationInfo(algorithm="NGRAM", policy="adaptive"),
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_policy": "off"},
            SpeculationInfo(algorithm="NGRAM", policy="off"),
        ),
        (
            {
                "speculative_algorithm": "NGRAM",
                "speculative_policy": "threshold",
                "speculative_disable_batch_threshold": 4,
            },
            SpeculationInfo(algorithm="NGRAM", policy="threshold"),
        ),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/models/e"},
            SpeculationInfo(algorithm="EAGLE3", policy="adaptive", draft_model="/models/e"),
        ),
    ],
)
def test_what_the_flags_ask_for(flags: dict[str, Any], info: SpeculationInfo) -> None:
    assert SpeculationInfo.of(EngineConfig(**flags)) == info


def test_before_the_first_step() -> None:
    assert body(PLAIN, EngineStats()) == {
        "algorithm": "NONE",
        "policy": "off",
        "draft_model": None,
        "shape": {"depth": 0, "branching": 1, "budget": 0},
        "reason": "",
        "acceptance": {"attempts": [], "accepted": [], "share": [], "recent": []},
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "drafter_failures": 0,
        "suspect": False,
        "synthetic_acceptance": None,
        "shapes": [],
        "prediction": {
            "steps": 0,
            "predicted_seconds": 0.0,
            "real_seconds": 0.0,
            "error_median": None,
            "error_p90": None,
        },
        "reliability": [],
    }


def test_every_figure_has_its_place() -> None:
    stats = EngineStats(
        drafted_tokens_total=1,
        accepted_tokens_total=2,
        drafter_failures_total=3,
        speculation=SpeculationStats(
            depth=4,
            branching=5,
            budget=6,
            reason="few requests",
            attempts=(8, 4, 0),
            accepted=(6, 1, 0),
            recent=(0.5, 0.25, 0.0),
            shapes=(
                ShapeStats(
                    depth=7,
                    branching=8,
                    reason="few",
                    steps=10,
                    committed=30,
                    drafted=40,
                    accepted=18,
                ),
                ShapeStats(
                    depth=0,
                    branching=1,
                    reason="no decodes",
                    steps=9,
                    committed=0,
                    drafted=0,
                    accepted=0,
                ),
            ),
            suspect=True,
            prediction=PredictionStats(
                steps=11, predicted_seconds=1.25, real_seconds=1.5, median=0.04, p90=0.12
            ),
            reliability=(
                ReliabilityStats(),
                ReliabilityStats(drafts=8, expected=1.2, accepted=2),
            ),
        ),
    )
    assert body(SpeculationInfo(algorithm="NGRAM", policy="adaptive"), stats) == {
        "algorithm": "NGRAM",
        "policy": "adaptive",
        "draft_model": None,
        "shape": {"depth": 4, "branching": 5, "budget": 6},
        "reason": "few requests",
        "acceptance": {
            "attempts": [8, 4, 0],
            "accepted": [6, 1, 0],
            "share": [0.75, 0.25, None],
            "recent": [0.5, 0.25, 0.0],
        },
        "drafted_tokens": 1,
        "accepted_tokens": 2,
        "drafter_failures": 3,
        "suspect": True,
        "synthetic_acceptance": None,
        "shapes": [
            {
                "depth": 7,
                "branching": 8,
                "reason": "few",
                "steps": 10,
                "committed_tokens": 30,
                "drafted_tokens": 40,
                "accepted_tokens": 18,
                "acceptance_length": 2.5,
            },
            {
                "depth": 0,
                "branching": 1,
                "reason": "no decodes",
                "steps": 9,
                "committed_tokens": 0,
                "drafted_tokens": 0,
                "accepted_tokens": 0,
                "acceptance_length": None,
            },
        ],
        "prediction": {
            "steps": 11,
            "predicted_seconds": 1.25,
            "real_seconds": 1.5,
            "error_median": 0.04,
            "error_p90": 0.12,
        },
        "reliability": [
            {"drafts": 0, "expected": None, "accepted": None},
            {"drafts": 8, "expected": 0.15, "accepted": 0.25},
        ],
    }


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000))),
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000))),
)
def test_shares_and_lengths_stay_in_their_bounds(
    positions: list[tuple[int, int]], rows: list[tuple[int, int]]
) -> None:
    """positions: (accepted, refused) each; rows: (rows, accepted) of each shape."""
    said = SpeculationStats(
        attempts=tuple(accepted + refused for accepted, refused in positions),
        accepted=tuple(accepted for accepted, _ in positions),
        shapes=tuple(
            ShapeStats(
                depth=number,
                branching=1,
                reason="r",
                steps=1,
                committed=count + accepted,
                drafted=accepted,
                accepted=accepted,
            )
            for number, (count, accepted) in enumerate(rows)
        ),
    )
    read = body(PLAIN, EngineStats(speculation=said))
    for (accepted, refused), share in zip(positions, read["acceptance"]["share"], strict=True):
        assert share is None if accepted + refused == 0 else 0 <= share <= 1
    for (count, accepted), shape in zip(rows, read["shapes"], strict=True):
        assert shape["acceptance_length"] == pytest.approx(1 + accepted / count)
