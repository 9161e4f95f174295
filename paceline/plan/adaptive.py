"""The adaptive policy: as many draft tokens as pay for themselves, at every step. Pure.

It maximises expected tokens per second (or what `--objective` says). With B decoding rows, of which
the N drafts most likely to survive are verified,

    rate(N) = (B + worth * sum of their survival) /
              (drafting(their levels) + step(B + prompt tokens + offered * N, context))

and N = 0, a plain step at its own cost, is always a candidate. Whoever owns them, drafts compete by
survival (`paceline.plan.search`), so rows carry different widths, 0 included. Which drafts are
verified is seen once they are made: those not below the choice's floor, the best ones first. Trees
of fixed shapes compete as well where the drafter makes trees. `worth` is the share of rows whose
drafter has something to offer, times what drafts have gained lately over what was expected of them:
a search for the best among estimates finds those that are too good.

Two rules beside it. What is not chosen stays unknown: while steps are plain, now and then one row
carries a draft, so seldom that it costs `PROBING` of the time. And the depth changes once what
staying has cost adds up to `SWITCH` of a step: at once for a great gain, late for a small one, and
hardly ever for noise. A probe is no change.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np

from paceline.plan.cost import CostTable
from paceline.plan.objective import THROUGHPUT, Objective
from paceline.plan.search import IMPOSSIBLE, Chains, Option, StepTimes
from paceline.plan.step import (
    NO_ROOM,
    NOBODY,
    PLAIN,
    PROBE,
    Choice,
    DraftShape,
    Load,
    RequestShape,
    StepPlan,
)
from paceline.plan.survival import Survival

SWITCH = 0.25  # of a step's worth, lost by staying, before the depth changes
PROBING = 0.005  # share of time that plain steps spend on finding out whether drafts would survive
SOONEST_PROBE = 4  # steps
ALIKE, ALIKE_AT_LEAST = 16, 64
"""Tokens of context, of a row and in all: so far apart, loads are looked at anew."""

ALL = np.ones(1)  # all that draft have drafts that are likely enough; or a single draft
_score = attrgetter("score")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An option that is worked out when it is chosen."""

    depth: int
    score: float
    option: Callable[[], Option]


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What could be done at a load. patience: plain steps before one probes."""

    plain: Option
    probe: Option
    patience: int
    candidates: tuple[_Candidate, ...]

    @property
    def best(self) -> _Candidate:
        return max(self.candidates, key=_score)


@dataclass(frozen=True)
class Adaptive:
    """most: the largest shape of a request. budget: draft tokens of a step at most."""

    costs: CostTable
    most: RequestShape
    budget: int
    objective: Objective = THROUGHPUT
    _latest: list[tuple[tuple[Any, ...], _Outlook]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )  # at most one: the last outlook, and for what

    def choose(self, load: Load) -> Choice:
        outlook = self._outlook(load)
        if not load.decodes:
            return _choice(outlook.plain, NOBODY)
        if load.room < 1:
            return _choice(outlook.plain, NO_ROOM)
        best = outlook.best
        here = [c for c in outlook.candidates if c.depth == load.latest.depth]
        stays = max(here, key=_score, default=best)
        others = [c.score for c in outlook.candidates if c.depth != stays.depth]
        missed = max(others) / stays.score - 1 if others else 0.0
        chosen = best if load.missed + missed >= SWITCH else stays
        if chosen.depth:
            reason = "fastest" if chosen is best else "kept: too little gain"
            return _choice(chosen.option(), reason, missed)
        if load.plain_steps < outlook.patience:
            return _choice(outlook.plain, "drafts do not pay", missed)
        return _choice(outlook.probe, PROBE)

    def _outlook(self, load: Load) -> _Outlook:
        """All that does not depend on the steps before; found once for loads that are alike.

        Loads are alike if they differ in context by a few tokens a row, and in nothing else that
        counts. So the choice depends on the load alone, whether it was remembered or not.
        """
        context = _rounded(load)
        room = min(load.room, self.budget, load.decodes * self.most.drafts)
        key = (load.decodes, load.prefill_tokens, load.rows, context, room, load.survival,
               load.pace)  # fmt: skip
        if not self._latest or self._latest[0][0] != key:
            alike = replace(load, context_tokens=context, room=room)
            self._latest[:] = [(key, self._look(alike))]
        return self._latest[0][1]

    def _look(self, load: Load) -> _Outlook:
        times = StepTimes(self.costs, load)
        plain = _alike(load, PLAIN, width=0, gain=0.0, seconds=times.plain)
        if not load.decodes:
            return _Outlook(plain, plain, 0, ())
        candidates = [_Candidate(0, self._score(load, plain), partial(_same, plain))]
        if load.survival.groups and load.room > 0:
            candidates += self._chains(load, times)
            candidates += self._trees(load, times)
        probe = self._probe(load, times)
        extra = (probe.seconds - plain.seconds) / plain.seconds
        patience = max(math.ceil(extra / PROBING), SOONEST_PROBE)
        return _Outlook(plain, probe, patience, tuple(candidates))

    def seconds(self, plan: StepPlan, drafts: int, drafting: int) -> float | None:
        return run_seconds(self.costs, plan.load, plan.shape, drafts=drafts, drafting=drafting)

    # What could be done ---------------------------------------------------------------------------

    def _chains(self, load: Load, times: StepTimes) -> Iterator[_Candidate]:
        chains = Chains(
            self.costs, load, times, depth=self.most.depth, budget=load.room,
            objective=self.objective,
        )  # fmt: skip
        for depth, score in enumerate(chains.scores.tolist(), start=1):
            if score > IMPOSSIBLE:
                yield _Candidate(depth, score, cache(partial(chains.option, depth)))

    def _probe(self, load: Load, times: StepTimes) -> Option:
        seconds = float(times(ALL, ALL)[0])
        return _alike(
            load,
            DraftShape(depth=1, budget=1),
            width=0,
            gain=load.survival.rates[0] / load.decodes,
            seconds=seconds + self.costs.drafting([1]),
        )

    def _trees(self, load: Load, times: StepTimes) -> Iterator[_Candidate]:
        """The same tree for every row, of some sizes, for each depth. Nodes compete across rows."""
        branching = self.most.branching
        if branching < 2:
            return
        rows = sum(count for _, count in load.survival.groups)
        ranks = ranks_of(load.survival, branching)
        sizes = [n for n in _sizes(self.most.drafts) if 2 <= n <= load.room // rows]
        shapes = [(d, n) for d in range(1, self.most.depth + 1) for n in sizes if d <= n]
        gains = {d: tree_gains(ranks, d, self.most.drafts) for d, _ in shapes}
        shapes = [(d, n) for d, n in shapes if n <= len(gains[d])]
        if not shapes:
            return
        seconds = times(np.array([n * rows for _, n in shapes], dtype=float), ALL) + np.array(
            [self.costs.drafting(nodes_of(d, branching, n, rows)) for d, n in shapes]
        )
        found = np.array([gains[d][n - 1] for d, n in shapes])
        tokens = np.stack((1 + load.survival.worth * found, np.ones(len(shapes))))
        each = np.array([rows, load.decodes - rows], dtype=float)
        scores = self.objective.score(each, tokens, seconds).tolist()
        for (depth, size), gain, time, score in zip(
            shapes, found.tolist(), seconds.tolist(), scores, strict=True
        ):
            shape = DraftShape(depth=depth, branching=branching, budget=size * rows)
            yield _Candidate(
                depth, score, partial(_alike, load, shape, width=size, gain=gain, seconds=time)
            )

    def _score(self, load: Load, option: Option) -> float:
        """Of an option in which every row that may draft does the same."""
        drafting = sum(count for _, count in load.survival.groups)
        other = load.decodes - drafting
        each = (option.tokens - other) / drafting if drafting else 1.0
        rows, tokens = np.array([drafting, other], dtype=float), np.array([each, 1.0])
        return float(self.objective.score(rows, tokens, np.array(option.seconds)))


def _rounded(load: Load) -> int:
    """Context to the nearest `ALIKE` tokens of each row, `ALIKE_AT_LEAST` in all."""
    unit = max(ALIKE * load.rows, ALIKE_AT_LEAST)
    return (load.context_tokens + unit // 2) // unit * unit


def _same(option: Option) -> Option:
    return option


def _alike(load: Load, shape: DraftShape, *, width: int, gain: float, seconds: float) -> Option:
    """Every row that may draft does the same. gain: tokens that each is expected to gain."""
    groups = load.survival.groups
    drafting = sum(count for _, count in groups)
    return Option(
        shape=shape,
        widths=(width,) * len(groups) if width else (),
        floor=0.0,
        tokens=load.decodes + load.survival.worth * gain * drafting,
        seconds=seconds,
    )


def _choice(option: Option, reason: str, missed: float = 0.0) -> Choice:
    return Choice(
        shape=option.shape,
        widths=option.widths,
        floor=option.floor,
        missed=missed,
        reason=reason,
        predicted_seconds=option.seconds,
        predicted_tokens=option.tokens,
    )


def run_seconds(
    costs: CostTable, load: Load, shape: DraftShape, *, drafts: int, drafting: int
) -> float:
    """What a step should have taken that verified so many drafts, made for `drafting` rows."""
    tokens = load.decodes + load.prefill_tokens + drafts
    each = shape.budget // max(load.decodes, 1)
    nodes = nodes_of(shape.depth, shape.branching, each, drafting) if drafting else ()
    step = costs.step(tokens, load.rows, load.context_tokens)
    return step * load.pace.factor(tokens) + costs.drafting(nodes)


def nodes_of(depth: int, branching: int, size: int, rows: int) -> tuple[int, ...]:
    """Nodes of each level, if so many rows grow trees (or chains) of `size` drafts."""
    beam = branching if depth < 2 else max(min(branching, size // (depth - 1)), 1)
    return (rows, *[rows * beam] * (depth - 1))


def _sizes(most: int) -> list[int]:
    """Sizes of trees that are looked at: doublings, and the largest."""
    return sorted({min(1 << i, most) for i in range(1, most.bit_length() + 1)})


def ranks_of(survival: Survival, branching: int) -> tuple[float, ...]:
    """To two digits, so that `tree_gains` need not be worked out anew at every step."""
    return tuple(round(rank, 2) for rank in survival.ranks[:branching])


@lru_cache(maxsize=256)
def tree_gains(ranks: tuple[float, ...], depth: int, most: int) -> tuple[float, ...]:
    """Expected accepted drafts of the best tree of 1, 2, ... nodes.

    ranks: probability that the target's token is the i-th best child of an accepted node. The best
    nodes first: a path's probability is the product of its ranks'.
    """
    heap = [(-ranks[0], 1, 0)] if ranks else []  # (-probability, level, rank)
    found: list[float] = []
    while heap and len(found) < most:
        minus, level, rank = heapq.heappop(heap)
        found.append(-minus)
        if rank + 1 < len(ranks) and ranks[rank] > 0:
            heapq.heappush(heap, (minus / ranks[rank] * ranks[rank + 1], level, rank + 1))
        if level < depth:
            heapq.heappush(heap, (minus * ranks[0], level + 1, 0))
    return tuple(accumulate(found))
