"""Policies by short names, as people compare them: `plain`, `static:3`, `tree:16`, ... Pure."""

from __future__ import annotations

import json

from paceline.config import MAX_DEPTH, MAX_DRAFTS
from paceline.errors import ConfigError
from paceline.plan.adaptive import Adaptive
from paceline.plan.cost import CostTable
from paceline.plan.policy import Off, Schedule, SpeculationPolicy, Static, Threshold
from paceline.plan.step import RequestShape

TREE_DEPTH = TREE_BRANCHING = 4
HELP = (
    "plain, static:DEPTH, tree:TOKENS, threshold:REQUESTS:DEPTH, schedule:[[1,4,5],...], adaptive"
)


def policy_of_arm(
    name: str, costs: CostTable, *, most: RequestShape, budget: int = 10**9
) -> SpeculationPolicy:
    """most, budget: of the adaptive policy. Raises ConfigError for a name that says nothing."""
    kind, _, rest = name.partition(":")
    try:
        match kind, rest:
            case ("plain" | "off", ""):
                return Off()
            case "adaptive", "":
                return Adaptive(costs, most, budget)
            case "static", depth:
                return Static(RequestShape.chain(_within(depth, MAX_DEPTH)))
            case "tree", tokens:
                return Static(tree_of(_within(tokens, MAX_DRAFTS)))
            case "threshold", both:
                running, depth = both.split(":")
                shape = RequestShape.chain(_within(depth, MAX_DEPTH))
                return Threshold(shape, _within(running, 10**6))
            case "schedule", rows:
                return Schedule.parse(json.loads(rows))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the arm {name!r} makes no sense ({error}): give {HELP}") from None
    raise ConfigError(f"there is no arm {name!r}: give {HELP}")


def tree_of(tokens: int) -> RequestShape:
    """A tree of so many draft tokens, four levels of four children where it is large enough."""
    return RequestShape(depth=min(TREE_DEPTH, tokens), branching=TREE_BRANCHING, drafts=tokens)


def _within(text: str, most: int) -> int:
    number = int(text)
    if not 1 <= number <= most:
        raise ValueError(f"{number} is not 1 to {most}")
    return number
