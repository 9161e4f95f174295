"""The search for the best chains: how deep, and how likely a draft must be to be verified. Pure.

The drafts that a step could carry fall into classes: (group of requests, position, how likely their
whole path is to survive). Taken in order of survival, every depth has one best number of them; all
depths and numbers are looked at at once, as arrays of (depth, class).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost import Array, CostTable
from paceline.plan.objective import Objective
from paceline.plan.step import DraftShape, Load
from paceline.plan.survival import MOST

IMPOSSIBLE = -1.0  # below every score


@dataclass(frozen=True, slots=True)
class Option:
    """One way to speculate: what it is expected to bring and to take."""

    shape: DraftShape
    widths: tuple[int, ...]
    floor: float
    tokens: float
    seconds: float


class StepTimes:
    """Seconds of steps at one load and the present pace, by the drafts that they carry.

    Linear between the sizes of the cost table.
    """

    FAR = 64.0  # times the table's largest size: beyond it the same slope goes on

    def __init__(self, costs: CostTable, load: Load) -> None:
        sizes = np.array((*costs.tokens.x, costs.tokens.x[-1] * self.FAR))
        context = load.context_tokens * costs.context.many(sizes / max(load.rows, 1))
        self._sizes = sizes
        self._seconds = (costs.tokens.many(sizes) + context) * load.pace.factors(sizes)
        self._given = float(load.decodes + load.prefill_tokens)
        self._offered = load.survival.offered
        self._decodes = max(load.decodes, 1)
        self.plain = float(np.interp(self._given, self._sizes, self._seconds))

    def __call__(self, drafts: Array, share: Array) -> Array:
        """Of steps that may carry so many drafts, of which a part is offered.

        Many rows offer about that part at every step; a single one all or nothing, and step times
        are not linear: in between it is something in between. share: of the rows that may draft,
        those with a draft that is likely enough.
        """
        mean = np.interp(self._given + self._offered * drafts, self._sizes, self._seconds)
        full = np.interp(self._given + drafts / share, self._sizes, self._seconds)
        either = self.plain + self._offered * share * (full - self.plain)
        return np.asarray(mean + (either - mean) / self._decodes)


class Chains:
    """All chains at one load, for each depth the best. Some group must have rows.

    scores: (D,), by the objective; `IMPOSSIBLE` where no chains of that depth keep to the budget.
    """

    def __init__(
        self, costs: CostTable, load: Load, times: StepTimes, *, depth: int, budget: int,
        objective: Objective,
    ) -> None:  # fmt: skip
        """depth: the deepest that is looked at. budget: draft tokens of the step at most."""
        self.costs, self.load, self.times = costs, load, times
        self.depth, self.budget = depth, budget
        classes = load.survival.classes(depth)
        level, part, alive = np.array(
            [(j, *each) for j, row in enumerate(classes, start=1) for each in row]
        ).T
        lean, self.rows = np.array(load.survival.groups, dtype=float).T
        groups, size = len(lean), len(level)
        here = np.minimum(alive * lean[:, None] ** level, MOST**level).ravel()
        order = np.argsort(-here, kind="stable")  # of equals the less deep: it stands before
        self.alive = here[order]  # (K,)
        self.level = level[order % size]
        self.group = order // size
        self.part = part[order % size]  # of a group's rows
        count = self.part * self.rows[self.group]
        self.mask = self.level <= np.arange(1, depth + 1)[:, None]  # (D, K)
        self.drafts = (count * self.mask).cumsum(axis=1)
        first = np.empty(groups * size, dtype=int)
        first[order] = np.arange(groups * size)
        starts = np.zeros(groups * size)
        starts[first.reshape(groups, size).min(axis=1)] = self.rows
        self.drafting = starts.cumsum()  # rows that draft at all
        self.share = np.maximum((count * (self.level == 1)).cumsum() / self.drafting, 1e-3)
        self.tokens = self._tokens()
        self.all_rows = np.append(self.rows, load.decodes - self.rows.sum())  # the last: no drafts
        score = objective.score(self.all_rows, self.tokens, self._seconds())
        if self.drafts[-1, -1] > budget:
            score[self.drafts > budget] = IMPOSSIBLE
        self.ends = score.argmax(axis=1)
        self.scores = score[np.arange(depth), self.ends]

    def _tokens(self) -> Array:
        """(G + 1, D, K): expected of one row of each group, and of one that may not draft."""
        own = self.group == np.arange(len(self.rows) + 1)[:, None]  # (G + 1, K)
        gains = ((self.part * self.alive * own)[:, None] * self.mask).cumsum(axis=2)
        return np.asarray(1 + self.load.survival.worth * gains)

    def _seconds(self) -> Array:
        """(D, K), every group that drafts at all drafting to the full depth."""
        seconds = self.times(self.drafts, self.share)
        levels = np.arange(1, self.depth + 1)[:, None] * self.costs.level.many(self.drafting)
        return np.asarray(seconds + levels + self.costs.proposal)

    def option(self, depth: int) -> Option:
        """The best chains of this depth. No group drafts deeper than it has any use for."""
        d, k = depth - 1, int(self.ends[depth - 1])
        used = (self.level * self.mask[d])[: k + 1]
        group = self.group[: k + 1]
        widths = tuple(int(used[group == g].max(initial=0)) for g in range(len(self.rows)))
        rows = [count for _, count in self.load.survival.groups]
        nodes = [
            sum(n for n, width in zip(rows, widths, strict=True) if width > level)
            for level in range(max(widths))
        ]
        drafts = float(self.drafts[d, k])
        step = self.times(self.drafts[d, k : k + 1], self.share[k : k + 1])
        return Option(
            shape=DraftShape(depth=len(nodes), budget=_room(drafts, sum(nodes), self.budget)),
            widths=widths,
            floor=self._floor(d, k),
            tokens=float(self.all_rows @ self.tokens[:, d, k]),
            seconds=float(step[0]) + self.costs.drafting(nodes),
        )

    def _floor(self, d: int, k: int) -> float:
        """Half way to what is not verified any more; nothing where all that is proposed is."""
        rest = np.flatnonzero(self.mask[d, k + 1 :])
        if not self.load.survival.spread or not len(rest):
            return 0.0
        return float(self.alive[k] + self.alive[k + 1 + rest[0]]) / 2


def _room(drafts: float, most: int, budget: int) -> int:
    """Draft tokens that a step may carry where so many are expected to be likely enough.

    Two standard deviations more, as if the drafts of two rows came together.
    """
    return max(min(math.ceil(drafts + 2 * math.sqrt(2 * drafts)), most, budget), 1)
