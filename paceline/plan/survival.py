"""What a policy sees of acceptance, as one frozen value. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 8  # draft positions that are told apart
MOST = 0.98  # no draft is certain
GUESS = 0.6  # acceptance before anything is known


@dataclass(frozen=True, slots=True)
class Survival:
    """How likely drafts are to survive.

    rates: acceptance by position of drafts whose predecessors were accepted. ranks: probability
    that the target's token is the i-th best child of an accepted node. offered: share of the drafts
    that may be drafted which the drafter really proposes. groups: (lean, rows): the decoding rows
    that may draft, by how much more or less than the average their drafts are accepted.
    """

    rates: tuple[float, ...] = (GUESS,) * DEPTH
    ranks: tuple[float, ...] = ()
    offered: float = 1.0
    groups: tuple[tuple[float, int], ...] = ()

    def of(self, lean: float) -> tuple[float, ...]:
        """Survival by position of a request that leans so: never rising."""
        alive, found = 1.0, []
        for rate in self.rates:
            alive *= min(rate * lean, MOST)
            found.append(alive)
        return tuple(found)


UNKNOWN = Survival()
