"""What the cost model expects of any policy's choice: its tokens and its seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.plan.adaptive import nodes_of, ranks_of, tree_gains
from paceline.plan.cost import CostTable
from paceline.plan.search import StepTimes
from paceline.plan.step import Choice, Load
from paceline.plan.survival import MOST


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one step: tokens committed, seconds."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def forecast(costs: CostTable, load: Load, choice: Choice) -> Forecast:
    """Of a choice at a load: chains by `Choice.widths`, or an even part of the budget; trees."""
    shape, groups = choice.shape, load.survival.groups
    each = shape.budget / max(load.decodes, 1)
    widths = choice.widths or (each,) * len(groups)
    if shape.branching > 1:
        nodes, drafts, gain = _trees(load, choice, widths)
    else:
        nodes, drafts, gain = _chains(load, choice, widths)
    seconds = float(StepTimes(costs, load)(np.array([drafts]), np.ones(1))[0])
    return Forecast(
        tokens=load.decodes + load.survival.worth * gain,
        seconds=seconds + costs.drafting(nodes),
    )


def _chains(
    load: Load, choice: Choice, widths: tuple[float, ...]
) -> tuple[list[int], float, float]:
    """(nodes drafted at each level, drafts verified, tokens gained) by all rows together."""
    depth = choice.shape.depth
    classes = load.survival.classes(depth)
    nodes, drafts, gain = [0] * depth, 0.0, 0.0
    for (lean, rows), width in zip(load.survival.groups, widths, strict=True):
        for level in range(1, depth + 1):
            going = rows * min(max(width - level + 1, 0.0), 1.0)  # a fraction: some of the rows
            nodes[level - 1] += round(going)
            for share, alive in classes[level - 1]:
                survival = min(alive * lean**level, MOST**level)
                if survival >= choice.floor:
                    drafts += going * share
                    gain += going * share * survival
    return [count for count in nodes if count], drafts, gain


def _trees(load: Load, choice: Choice, widths: tuple[float, ...]) -> tuple[list[int], float, float]:
    """The same for trees, all of one size: `Choice.widths` of trees do not differ."""
    rows = sum(count for _, count in load.survival.groups)
    size, shape = int(widths[0]) if widths else 0, choice.shape
    if not rows or not size:
        return [], 0.0, 0.0
    gains = tree_gains(ranks_of(load.survival, shape.branching), shape.depth, size)
    gain = gains[-1] if gains else 0.0
    return list(nodes_of(shape.depth, shape.branching, size, rows)), size * rows, gain * rows
