"""The body of `GET /v1/speculation`: who drafts, when, and what came of it so far. Pure.

Counts are those of the engine's latest `EngineStats`, from its start on. Knows the engine's
configuration. Knows nothing of HTTP, policies or drafters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.config import EngineConfig
from paceline.types import (
    EngineStats,
    PredictionStats,
    ReliabilityStats,
    ShapeStats,
    SpeculationStats,
)


@dataclass(frozen=True, kw_only=True)
class SpeculationInfo:
    """What the engine was configured to do. draft_model: the drafter's checkpoint, if it has one.

    The defaults are plain decode.
    """

    algorithm: str = "NONE"
    policy: str = "off"
    draft_model: str | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> SpeculationInfo:
        """The policy is off where nobody drafts, whatever its flag says."""
        return cls(
            algorithm=config.speculative_algorithm,
            policy=config.policy,
            draft_model=config.speculative_draft_model_path,
        )


def speculation_body(info: SpeculationInfo, stats: EngineStats) -> dict[str, Any]:
    """The whole answer. shape, reason: the policy's latest choice; null: nothing to divide by."""
    said = stats.speculation
    return {
        "algorithm": info.algorithm,
        "policy": info.policy,
        "draft_model": info.draft_model,
        "shape": {"depth": said.depth, "branching": said.branching, "budget": said.budget},
        "reason": said.reason,
        "acceptance": _acceptance(said),
        "drafted_tokens": stats.drafted_tokens_total,
        "accepted_tokens": stats.accepted_tokens_total,
        "drafter_failures": stats.drafter_failures_total,
        "suspect": said.suspect,
        "synthetic_acceptance": said.synthetic_acceptance,
        "shapes": [_shape(shape) for shape in said.shapes],
        "prediction": _prediction(said.prediction),
        "reliability": [_reliability(tenth) for tenth in said.reliability],
    }


def _acceptance(said: SpeculationStats) -> dict[str, Any]:
    """By draft position, the first draft of a row first."""
    counts = zip(said.attempts, said.accepted, strict=True)
    return {
        "attempts": said.attempts,
        "accepted": said.accepted,
        "share": [_ratio(accepted, attempts) for attempts, accepted in counts],
        "recent": said.recent,
    }


def _shape(shape: ShapeStats) -> dict[str, Any]:
    """One shape's steps. acceptance_length: tokens that a row gained in a step, on average.

    Each row gains its accepted drafts and one token more, so the latter count the rows. A request
    that ends with an accepted draft lacks that token, which makes the length a little too high.
    """
    return {
        "depth": shape.depth,
        "branching": shape.branching,
        "reason": shape.reason,
        "steps": shape.steps,
        "committed_tokens": shape.committed,
        "drafted_tokens": shape.drafted,
        "accepted_tokens": shape.accepted,
        "acceptance_length": _ratio(shape.committed, shape.committed - shape.accepted),
    }


def _prediction(said: PredictionStats) -> dict[str, Any]:
    """Step times foretold by the policy; an error is |real / predicted - 1|."""
    return {
        "steps": said.steps,
        "predicted_seconds": said.predicted_seconds,
        "real_seconds": said.real_seconds,
        "error_median": said.median,
        "error_p90": said.p90,
    }


def _reliability(tenth: ReliabilityStats) -> dict[str, Any]:
    """Drafts of one tenth of expected acceptance: as shares, what was expected and what came."""
    return {
        "drafts": tenth.drafts,
        "expected": tenth.expected / tenth.drafts if tenth.drafts else None,
        "accepted": _ratio(tenth.accepted, tenth.drafts),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
