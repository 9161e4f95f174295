"""What steps cost on this machine: a measured table, read between its points. Pure, no clock.

    step      a target step by its tokens, and what its attention adds with the context
    drafting  a drafter's proposal: something fixed, and a level by its nodes

All times are in seconds and never fall with more work: measured points are made monotone.
`paceline.exec.profile` measures; `Pace` corrects by what steps really took.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """A function through measured points, linear between them and on beyond the last.

    x ascending and distinct; y not falling. Below the first point it is the first value.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.x and len(self.x) == len(self.y), self
        assert list(self.x) == sorted(set(self.x)) and list(self.y) == sorted(self.y), self

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Through measured points: of equal x the smaller y, and no y below one to its left."""
        best: dict[float, float] = {}
        for x, y in points:
            best[x] = min(y, best.get(x, y))
        xs = sorted(best)
        return cls(tuple(xs), tuple(accumulate((best[x] for x in xs), max)))

    def __call__(self, at: float) -> float:
        x, y = self.x, self.y
        if at <= x[0]:
            return y[0]
        right = min(bisect_right(x, at), len(x) - 1)
        if right == 0:
            return y[0]
        left = right - 1
        return y[left] + (at - x[left]) * (y[right] - y[left]) / (x[right] - x[left])

    def many(self, at: Array) -> Array:
        """The same at many places."""
        x, y = self.x, self.y
        found = np.interp(at, x, y)
        if len(x) > 1:
            found += np.maximum(at - x[-1], 0.0) * ((y[-1] - y[-2]) / (x[-1] - x[-2]))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Costs of one target and drafter on one machine.

    tokens: a step's seconds by its tokens, at contexts near zero. context: seconds that a token of
    context adds, by the tokens of the row that attends to it. level: seconds of a drafter's level
    by its nodes. proposal: seconds of a proposal beside its levels.
    """

    tokens: Curve
    context: Curve
    level: Curve
    proposal: float

    def step(self, tokens: float, rows: int, context_tokens: float) -> float:
        """A step of `rows` rows that attend to `context_tokens` committed tokens together."""
        return self.tokens(tokens) + context_tokens * self.context(tokens / max(rows, 1))

    def drafting(self, nodes: Sequence[int]) -> float:
        """A proposal whose levels have so many nodes; nothing if there is none."""
        if not nodes or not nodes[0]:
            return 0.0
        return self.proposal + sum(self.level(count) for count in nodes)


ROUGH = CostTable(
    tokens=Curve.through([(1, 0.01), (4, 0.012), (16, 0.024), (1024, 1.0)]),
    context=Curve.through([(1, 1e-7)]),
    level=Curve.through([(1, 0.001), (64, 0.004)]),
    proposal=0.0003,
)
"""A guess to start from where nothing was measured; the pace adapts it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much slower than its table a machine is at the moment: in all, and by a step's size.

    by_size: one factor for each doubling of a step's tokens.
    """

    overall: float = 1.0
    by_size: tuple[float, ...] = ()

    def factor(self, tokens: float) -> float:
        """Real seconds of a step of so many tokens, over what the table says."""
        if not self.by_size:
            return self.overall
        place = math.log2(max(tokens, 1.0))
        left = min(int(place), len(self.by_size) - 1)
        right = min(left + 1, len(self.by_size) - 1)
        share = min(place - left, 1.0)
        return self.overall * (self.by_size[left] * (1 - share) + self.by_size[right] * share)

    def factors(self, tokens: Array) -> Array:
        """`factor` for many numbers of tokens."""
        if not self.by_size:
            return np.full_like(tokens, self.overall)
        places = np.log2(np.maximum(tokens, 1.0))
        found = np.interp(places, range(len(self.by_size)), self.by_size)
        return np.asarray(self.overall * found)


AS_MEASURED = Pace()


class PaceKeeper:
    """Learns the pace from real steps, slowly.

    What all sizes share is one factor, so that a machine that slows down does not make the sizes
    that were not tried look cheap.
    """

    RATE = 0.05  # weight of one step
    SIZES = 11  # doublings: up to 1,024 tokens and more
    FAR = 3.0  # a step further off than this much is an accident
    RANGE = (0.7, 1.4)  # of one size against the others

    def __init__(self) -> None:
        self._overall = 1.0
        self._by_size = [1.0] * self.SIZES

    def observe(self, tokens: float, predicted: float, seconds: float) -> None:
        """predicted: what the table says of that step, without any pace."""
        ratio = seconds / predicted
        if not self._overall / self.FAR < ratio < self._overall * self.FAR:
            ratio = self._overall * (self.FAR if ratio > self._overall else 1 / self.FAR)
        size = min(round(math.log2(max(tokens, 1.0))), self.SIZES - 1)
        self._overall += self.RATE * (ratio - self._overall)
        own = self._by_size[size] + self.RATE * (ratio / self._overall - self._by_size[size])
        self._by_size[size] = min(max(own, self.RANGE[0]), self.RANGE[1])

    def snapshot(self) -> Pace:
        return Pace(self._overall, tuple(self._by_size))
