"""How likely drafts are to survive: by position, by request, by rank among siblings. Pure.

Fed with every step's outcome by the scheduler, read by policies as a frozen `Survival`. A draft at
position j is tried only if those before it were accepted, so all rates here are conditional:

    chance of a draft = trust(the drafter's confidence) * factor(position) * lean
    its survival = product of the chances of it and all before it

Trust and factors are `paceline.plan.confidence`'s. `lean` says how much more or less than the
average this request's drafts are accepted. It starts at 1, is shrunk towards 1, and what it knows
fades, so that nobody is written off for ever.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from paceline.plan.confidence import Confidence
from paceline.plan.step import RowResult
from paceline.plan.survival import DEPTH, GUESS, Survival

RANKS = 8
LEANS = (0.1, 0.4, 0.7, 1.0, 1.3, 1.7)
"""Requests are grouped by how they lean, to the nearest of these: few make quick choices."""

_BETWEEN = tuple((a + b) / 2 for a, b in itertools.pairwise(LEANS))


@dataclass(slots=True)
class _Rate:
    """Hits by trials, older ones weighing less; starts from a guess."""

    hits: float
    trials: float
    memory: float  # trials after which a trial weighs a third

    def observe(self, hit: bool) -> None:
        fade = 1 - 1 / self.memory
        self.hits = self.hits * fade + hit
        self.trials = self.trials * fade + 1

    def fade(self, by: float, least: float) -> None:
        """A step has passed: what is known weighs less, but no less than so many trials."""
        if self.trials * by > least:
            self.hits *= by
            self.trials *= by

    @property
    def value(self) -> float:
        return self.hits / self.trials


@dataclass(slots=True)
class _Lean:
    """One request's hits against what the average request would have had. group: of `LEANS`."""

    hits: float = 0.0
    expected: float = 0.0
    group: float = 1.0


@dataclass(slots=True)
class _Kept:
    """Tokens gained by drafts over those expected; what is known fades, towards 1."""

    MEMORY = 150.0  # expected tokens,
    STEPS = 40.0  # but so many steps at the least: those of large batches promise much
    SHRINK = 20.0  # expected tokens that must be seen before it is believed half
    FORGET = 0.995  # each step, so that drafts are tried again some day
    RANGE = (0.2, 1.5)

    gained: float = 0.0
    expected: float = 0.0

    def observe(self, gained: float, expected: float) -> None:
        fade = 1 - min(expected / self.MEMORY, 1 / self.STEPS)
        self.gained = self.gained * fade + gained
        self.expected = self.expected * fade + expected

    def fade(self) -> None:
        self.gained *= self.FORGET
        self.expected *= self.FORGET

    @property
    def value(self) -> float:
        value = (self.gained + self.SHRINK) / (self.expected + self.SHRINK)
        return min(max(value, self.RANGE[0]), self.RANGE[1])


class Acceptance:
    """Learns from outcomes. Keys tell requests apart; whoever leaves is forgotten."""

    MEMORY = 100  # trials by position: workloads change within minutes
    OWN = 30  # trials of one request
    SHRINK = 2.0  # hits that a request must show before it is believed half
    FORGET = 0.995  # what a request keeps of its evidence each step, drafting or not
    EVERY = 16  # steps after which snapshots say what is new; sooner if it is an eighth of all
    WEIGHT = 5.0  # trials that the first guess is worth, and for a position the one before it
    FADE = 0.99  # of what rates weigh, each step: what is seldom seen is soon believed
    LEAST = 8.0  # trials; what was known of a drafter that is left alone does not fade away

    def __init__(self) -> None:
        rate, weight = GUESS, self.WEIGHT
        self._rates = [_Rate(rate * weight, weight, self.MEMORY) for _ in range(DEPTH)]
        first = 0.15  # second child: what is typical of trained drafters
        self._ranks = [
            _Rate(weight * (rate if i == 0 else first * 0.5 ** (i - 1)), weight, self.MEMORY)
            for i in range(RANKS)
        ]
        self._offered = _Rate(weight, weight, self.MEMORY)
        self._kept = _Kept()
        self._leans: dict[Hashable, _Lean] = {}
        self.confidence = Confidence()
        self._latest = Survival()
        self._steps = self._seen = self._said = 0  # outcomes, and those that snapshots know
        self.refresh()

    def observe(self, key: Hashable, allowed: int, done: RowResult) -> None:
        """A row that was allowed so many drafts has its outcome."""
        if allowed:
            self._seen += 1
            self._offered.observe(done.proposed != ())
        if not done.walk:
            return
        leans = self.lean(key)
        lean = self._leans.setdefault(key, _Lean())
        fade = 1 - 1 / self.OWN
        for position, (children, rank) in enumerate(done.walk[:DEPTH]):
            lean.hits = lean.hits * fade + (rank > 0)
            lean.expected *= fade
            for place, sure in enumerate(children[:RANKS], start=1):
                hit = rank == place
                expected = self.confidence.observe(position, sure, lean=leans, hit=hit)
                lean.expected += expected / leans
                self._ranks[place - 1].observe(hit)
            self._rates[position].observe(rank > 0)

    def gained(self, tokens: int, expected: float) -> None:
        """A step's drafts gained so many tokens. expected: as if `Survival.kept` were 1."""
        self._kept.observe(tokens, expected)

    def fade(self) -> None:
        """A step has passed: what is known of single requests is a little older."""
        for lean in self._leans.values():
            lean.hits *= self.FORGET
            lean.expected *= self.FORGET
        self._kept.fade()
        self.confidence.fade()
        for rate in (self._offered, self._rates[0], *self._ranks):
            rate.fade(self.FADE, self.LEAST)
        for rate in self._rates[1:]:
            rate.fade(self.FADE, 0.0)
        self._steps += 1
        fresh = self._seen - self._said
        if fresh > self._said // 8 or (fresh and self._steps % self.EVERY == 0):
            self.refresh()

    def forget(self, key: Hashable) -> None:
        self._leans.pop(key, None)

    def lean(self, key: Hashable) -> float:
        """How this request leans, as of the last refresh; a newcomer not at all."""
        known = self._leans.get(key)
        return 1.0 if known is None else known.group

    def snapshot(self, leans: Iterable[float]) -> Survival:
        """leans: of the decoding rows that may draft."""
        groups: dict[float, int] = {}
        for lean in leans:
            groups[lean] = groups.get(lean, 0) + 1
        found = tuple(sorted(groups.items(), reverse=True))
        if found != self._latest.groups:
            self._latest = dataclasses.replace(self._latest, groups=found)
        return self._latest

    def refresh(self) -> None:
        """Let snapshots say what was learnt up to now. `fade` sees to it every few steps."""
        self._said = self._seen
        for each in self._leans.values():
            value = (each.hits + self.SHRINK) / (each.expected + self.SHRINK)
            each.group = LEANS[bisect(_BETWEEN, value)]
        self.confidence.refresh()
        self._latest = dataclasses.replace(
            self.confidence.known,
            rates=self._by_position(),
            ranks=tuple(rate.value for rate in self._ranks),
            offered=self._offered.value,
            kept=self._kept.value,
            groups=self._latest.groups,
        )

    def _by_position(self) -> tuple[float, ...]:
        """Where little is known of a position, it is as the one before."""
        found = [self._rates[0].value]
        for rate in self._rates[1:]:
            known = rate.hits + self.WEIGHT * found[-1]
            found.append(known / (rate.trials + self.WEIGHT))
        return tuple(found)
