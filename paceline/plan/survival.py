"""What a policy sees of acceptance, as one frozen value. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEPTH = 8  # draft positions that are told apart
MOST = 0.98  # no draft is certain
GUESS = 0.6  # acceptance before anything is known
TENTHS = tuple(tenth / 10 + 0.05 for tenth in range(10))

Classes = tuple[tuple[float, float], ...]
"""(share of the drafts, survival of each), the likeliest first."""


def tenth_of(share: float) -> int:
    """Which tenth a number in [0, 1] falls into, from 0."""
    return min(int(share * 10), 9)


@dataclass(frozen=True, slots=True)
class Survival:
    """How likely drafts are to survive.

    rates: acceptance by position of drafts whose predecessors were accepted. ranks: probability
    that the target's token is the i-th best child of an accepted node. offered: share of the drafts
    that may be drafted which the drafter really proposes. groups: (lean, rows): the decoding rows
    that may draft, by how much more or less than the average their drafts are accepted. kept: what
    drafts have gained lately, in tokens, over what was expected of them: whatever else is wrong.

    trust: acceptance of a draft by tenth of the drafter's confidence in it. positions: a factor to
    it by position. spread: for each position the drafts that are proposed there, by the survival of
    their whole path; positions after the last are as `rates` say.
    """

    rates: tuple[float, ...] = (GUESS,) * DEPTH
    ranks: tuple[float, ...] = ()
    offered: float = 1.0
    groups: tuple[tuple[float, int], ...] = ()
    kept: float = 1.0
    trust: tuple[float, ...] = TENTHS
    positions: tuple[float, ...] = (1.0,) * DEPTH
    spread: tuple[Classes, ...] = ()

    @property
    def worth(self) -> float:
        """Tokens to expect for each that drafts would gain if all were offered and as likely as
        they look."""
        return self.offered * self.kept

    def of(self, lean: float) -> tuple[float, ...]:
        """Survival by position of a request that leans so: never rising."""
        alive, found = 1.0, []
        for rate in self.rates:
            alive *= min(rate * lean, MOST)
            found.append(alive)
        return tuple(found)

    def classes(self, depth: int) -> list[Classes]:
        """The drafts of an average request by position, as `spread`, for `depth` positions.

        Not kept below certainty yet: a request may lean."""
        found = list(self.spread[:depth])
        alive = sum(share * survival for share, survival in found[-1]) if found else 1.0
        for rate in self.rates[len(found) : depth]:
            alive *= rate
            found.append(((1.0, alive),))
        return found

    def chance(self, position: int, confidence: float, lean: float) -> float:
        """That a draft is accepted whose predecessors were. position: 0 is the first."""
        known = self.trust[tenth_of(confidence)] * self.positions[min(position, DEPTH - 1)]
        return min(known * lean, MOST)

    def paths(
        self, confidence: Sequence[float], parents: Sequence[int], *, lean: float
    ) -> list[float]:
        """Survival of each draft of a row: that it and all before it are accepted.

        parents: 0 is the root, j the j-th draft. Below its parent's, so that the best drafts of a
        row always form a tree.
        """
        alive, level = [1.0], [0]
        for sure, parent in zip(confidence, parents, strict=True):
            alive.append(alive[parent] * self.chance(level[parent], sure, lean))
            level.append(level[parent] + 1)
        return alive[1:]


UNKNOWN = Survival()
