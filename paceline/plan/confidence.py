"""What a drafter's confidence is worth: learnt from what became of its drafts. Pure.

A drafter says of each draft how sure it is, given that the drafts before it are right. Whatever its
scale, the share of accepted ones in each tenth of it is counted; what is not seen for long drifts
back to what the drafter says. Deeper drafts may be worse than they claim: a factor by position.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.survival import DEPTH, MOST, TENTHS, Classes, Survival, tenth_of
from paceline.types import ReliabilityStats

EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85)
"""Between the classes of path survival that a policy tells apart."""


@dataclass(slots=True)
class _Evidence:
    """Hits against expected hits or trials, fading."""

    hits: float = 0.0
    against: float = 0.0


class Confidence:
    """Learns trust by tenth, factors by position, and how survival is spread over drafts.

    known: as of the last `refresh`.
    """

    MEMORY = 200.0  # trials of one tenth or position
    SEEN = 400.0  # proposals that the spread remembers
    WEIGHT = 5.0  # trials that the drafter's own word is worth
    SHRINK = 10.0  # expected hits before a position is believed half
    FADE = 0.998  # of what is known of a tenth, each step

    def __init__(self) -> None:
        self._tenths = [_Evidence() for _ in TENTHS]
        self._positions = [_Evidence() for _ in range(DEPTH)]
        self._spread = [[_Evidence() for _ in range(len(EDGES) + 1)] for _ in range(DEPTH)]
        self._reliability = [_Count() for _ in TENTHS]
        self.known = Survival()

    def observe(self, position: int, confidence: float, *, lean: float, hit: bool) -> float:
        """A draft whose predecessors were accepted was, or was not. Returns what was expected."""
        known = self.known
        expected = known.chance(position, confidence, lean)
        self._reliability[tenth_of(expected)].add(expected, hit)
        at = min(position, DEPTH - 1)
        self._add(self._tenths[tenth_of(confidence)], hit, 1.0)
        self._add(self._positions[at], hit, known.trust[tenth_of(confidence)] * lean)
        return expected

    def _add(self, evidence: _Evidence, hit: bool, against: float) -> None:
        keep = 1 - 1 / self.MEMORY
        evidence.hits = evidence.hits * keep + hit
        evidence.against = evidence.against * keep + against

    def proposed(self, chain: Sequence[float]) -> None:
        """A chain of drafts of such confidence was proposed, verified or not."""
        known, keep = self.known, 1 - 1 / self.SEEN
        paths = known.paths(chain, range(len(chain)), lean=1.0)
        for classes, survival in zip(self._spread, paths, strict=False):
            for each in classes:
                each.hits *= keep
                each.against *= keep
            found = classes[bisect(EDGES, survival)]
            found.hits += survival
            found.against += 1.0

    def fade(self) -> None:
        """A step has passed."""
        for each in self._tenths:
            each.hits *= self.FADE
            each.against *= self.FADE

    def refresh(self) -> None:
        """`known` is what was learnt up to now: trust, positions and spread."""
        self.known = Survival(
            trust=self._trust(), positions=self._factors(), spread=self._classes()
        )

    def _classes(self) -> tuple[Classes, ...]:
        """By position, as far as anything was proposed; the likeliest first."""
        found = []
        for classes in self._spread:
            total = sum(each.against for each in classes)
            if not total:
                break
            found.append(
                tuple(
                    (each.against / total, each.hits / each.against)
                    for each in reversed(classes)
                    if each.against > 0.002 * total
                )
            )
        return tuple(found)

    def reliability(self) -> tuple[ReliabilityStats, ...]:
        return tuple(
            ReliabilityStats(drafts=each.drafts, expected=each.expected, accepted=each.accepted)
            for each in self._reliability
        )

    def _trust(self) -> tuple[float, ...]:
        """Never falling with confidence: neighbours that contradict each other are pooled."""
        weight = self.WEIGHT
        pools: list[tuple[float, float, int]] = []  # hits, trials, tenths
        for each, says in zip(self._tenths, TENTHS, strict=True):
            pools.append((each.hits + says * weight, each.against + weight, 1))
            while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
                hits, trials, count = pools.pop()
                before = pools.pop()
                pools.append((before[0] + hits, before[1] + trials, before[2] + count))
        return tuple(
            min(hits / trials, MOST) for hits, trials, count in pools for _ in range(count)
        )

    def _factors(self) -> tuple[float, ...]:
        return tuple(
            (each.hits + self.SHRINK) / (each.against + self.SHRINK) for each in self._positions
        )


@dataclass(slots=True)
class _Count:
    drafts: int = 0
    expected: float = 0.0
    accepted: int = 0

    def add(self, expected: float, hit: bool) -> None:
        self.drafts += 1
        self.expected += expected
        self.accepted += hit
