"""The adaptive policy: as many draft tokens as pay for themselves, at every step. Pure.

It maximises expected tokens per second. With B decoding rows, of which the N drafts most likely to
survive are verified,

    rate(N) = (B + offered * sum of their survival) /
              (drafting(their levels) + step(B + prompt tokens + offered * N, context))

and N = 0, a plain step at its own cost, is always a candidate. Whoever owns them, drafts compete by
survival, so rows carry different widths, 0 included. Trees of fixed shapes compete as well where
the drafter makes trees.

Two rules beside it. What is not chosen stays unknown: while steps are plain, now and then one row
carries a draft, so seldom that it costs `PROBING` of the time. And the depth is changed only for a
gain of `HYSTERESIS`, so that noise does not flap it; a probe is no change.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from paceline.plan.cost import CostTable
from paceline.plan.step import (
    NOBODY,
    PLAIN,
    PROBE,
    Choice,
    DraftShape,
    Load,
    RequestShape,
    StepPlan,
)

HYSTERESIS = 0.02  # gain in tokens per second below which the depth stays as it is
PROBING = 0.005  # share of time that plain steps spend on finding out whether drafts would survive
SOONEST_PROBE = 8  # steps
PATIENCE = 3  # draft groups that make it slower before the search for more ends


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to speculate: what it is expected to bring and to take."""

    shape: DraftShape
    widths: tuple[int, ...]
    tokens: float  # expected, committed
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Adaptive:
    """most: the largest shape of a request. budget: draft tokens of a step at most."""

    costs: CostTable
    most: RequestShape
    budget: int

    def choose(self, load: Load) -> Choice:
        plain = self._option(load, PLAIN, (), (), 0.0, 0)
        if not load.decodes:
            return _choice(plain, NOBODY)
        options = [plain, *self._options(load)]
        best = max(options, key=_rate)
        stays = max(
            (o for o in options if o.shape.depth == load.latest.depth), key=_rate, default=best
        )
        chosen = best if best.rate > stays.rate * (1 + HYSTERESIS) else stays
        if chosen is plain:
            return self._plain(load, plain)
        return _choice(chosen, "fastest" if chosen is best else "kept: gain below 2 %")

    def _plain(self, load: Load, plain: _Option) -> Choice:
        """A plain step; or one that carries a single draft to find out what has changed."""
        probe = self._option(
            load, DraftShape(depth=1, budget=1), (), (1,), load.survival.of(1.0)[0], 1
        )
        extra = probe.seconds - plain.seconds
        interval = max(math.ceil(extra / (PROBING * plain.seconds)), SOONEST_PROBE)
        if load.plain_steps < interval:
            return _choice(plain, "drafts do not pay")
        return Choice(
            shape=probe.shape,
            reason=PROBE,
            predicted_seconds=probe.seconds,
            predicted_tokens=probe.tokens,
        )

    def seconds(self, plan: StepPlan, drafts: int) -> float | None:
        """At pace 1, with the drafts that were really proposed spread over the levels planned."""
        load, shape = plan.load, plan.choice.shape
        tokens = load.decodes + load.prefill_tokens + drafts
        seconds = self.costs.step(tokens, load.rows, load.context_tokens)
        if not drafts:
            return seconds
        rows = -(-drafts // max(shape.depth, 1))
        return seconds + self.costs.drafting([rows] * shape.depth)

    # What could be done ---------------------------------------------------------------------------

    def _options(self, load: Load) -> Iterator[_Option]:
        yield from self._chains(load)
        if self.most.branching > 1:
            yield from self._trees(load)

    def _chains(self, load: Load) -> Iterator[_Option]:
        """For each depth the most likely drafts, one group's next draft after the other."""
        groups = load.survival.groups
        survival = [load.survival.of(lean)[: self.most.depth] for lean, _ in groups]
        drafts = sorted(
            (
                (alive, -level, g)
                for g, row in enumerate(survival)
                for level, alive in enumerate(row)
            ),
            reverse=True,
        )  # those of a group come in order: survival never rises
        for depth in range(1, self.most.depth + 1):
            best = self._best_prefix(load, depth, [d for d in drafts if d[1] > -depth])
            if best is not None:
                yield best

    def _best_prefix(
        self, load: Load, depth: int, drafts: Sequence[tuple[float, int, int]]
    ) -> _Option | None:
        """Chains of `depth`: of (survival, -level, group) the first ones, as many as pay.

        The rate rises and then falls with their number; past the rise the search ends.
        """
        groups, offered, costs = load.survival.groups, load.survival.offered, self.costs
        nodes, level_seconds = [0] * depth, [0.0] * depth
        gain, count, best, best_rate, falls = 0.0, 0, 0, 0.0, 0
        for number, (alive, minus_level, g) in enumerate(drafts, start=1):
            rows = groups[g][1]
            if count + rows > self.budget:
                break
            gain, count = gain + alive * rows, count + rows
            nodes[-minus_level] += rows
            level_seconds[-minus_level] = costs.level(nodes[-minus_level])
            if not nodes[-1]:  # what is less deep stands under its own depth
                continue
            seconds = self._step(load, count) + costs.proposal + sum(level_seconds)
            rate = (load.decodes + offered * gain) / seconds
            falls = 0 if rate > best_rate else falls + 1
            if not falls:
                best, best_rate = number, rate
            elif falls == PATIENCE:
                break
        return self._prefix(load, depth, drafts[:best]) if best else None

    def _prefix(self, load: Load, depth: int, drafts: Sequence[tuple[float, int, int]]) -> _Option:
        groups = load.survival.groups
        widths, nodes = [0] * len(groups), [0] * depth
        gain = 0.0
        for alive, minus_level, g in drafts:
            widths[g] = 1 - minus_level
            nodes[-minus_level] += groups[g][1]
            gain += alive * groups[g][1]
        shape = DraftShape(depth=depth, budget=sum(nodes))
        return self._option(load, shape, tuple(widths), nodes, gain, sum(nodes))

    def _trees(self, load: Load) -> Iterator[_Option]:
        """The same tree for every row, of a few sizes."""
        rows = sum(count for _, count in load.survival.groups)
        gains = tree_gains(
            tuple(round(rank, 2) for rank in load.survival.ranks[: self.most.branching]),
            self.most.depth,
            self.most.drafts,
        )
        for size in _sizes(self.most.drafts):
            if not rows or size < 2 or size > len(gains) or size * rows > self.budget:
                continue
            depth = min(self.most.depth, size)
            beam = self.most.branching if depth < 2 else min(
                self.most.branching, size // (depth - 1)
            )  # fmt: skip
            nodes = (rows, *[rows * beam] * (depth - 1))
            shape = DraftShape(depth=depth, branching=self.most.branching, budget=size * rows)
            widths = (size,) * len(load.survival.groups)
            yield self._option(load, shape, widths, nodes, gains[size - 1] * rows, size * rows)

    def _option(
        self,
        load: Load,
        shape: DraftShape,
        widths: tuple[int, ...],
        nodes: Sequence[int],
        gain: float,
        drafts: int,
    ) -> _Option:
        seconds = self._step(load, drafts) + self.costs.drafting(nodes)
        return _Option(shape, widths, load.decodes + load.survival.offered * gain, seconds)

    def _step(self, load: Load, drafts: int) -> float:
        """Seconds of a step that may carry so many drafts, of which a share is offered.

        Many rows offer about that share at every step, a single one all or nothing: in between it
        is something in between.
        """
        offered, given = load.survival.offered, load.decodes + load.prefill_tokens
        mean = self._at(load, given + offered * drafts)
        if offered > 0.99 or not drafts:
            return mean
        either = (1 - offered) * self._at(load, given) + offered * self._at(load, given + drafts)
        return mean + (either - mean) / max(load.decodes, 1)

    def _at(self, load: Load, tokens: float) -> float:
        seconds = self.costs.step(tokens, load.rows, load.context_tokens)
        return seconds * load.pace.factor(tokens)


def _rate(option: _Option) -> float:
    return option.rate


def _choice(option: _Option, reason: str) -> Choice:
    return Choice(
        shape=option.shape,
        widths=option.widths,
        reason=reason,
        predicted_seconds=option.seconds,
        predicted_tokens=option.tokens,
    )


def _sizes(most: int) -> list[int]:
    """Sizes of trees that are looked at: doublings, and the largest."""
    return sorted({min(1 << i, most) for i in range(1, most.bit_length() + 1)})


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
