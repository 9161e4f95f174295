"""Growing draft trees level by level, as EAGLE-2 does (arXiv 2406.16858), many requests at once.

A level scores the children of its nodes; a child's worth is the probability of its whole path. The
best few of a level (the beam) are the next level's nodes, and of all candidates ever scored the
best are the drafts. A path's worth never grows with its length, so they always form a tree.

Every request has a shape of its own: fewer drafts near its end, none deeper than it can use. How
many nodes each has at which level is known beforehand, so the levels are ragged batches: a tile a
request, its nodes in the beam's order. Knows no model, page or slot; a chain is a beam of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Plot:
    """Room for one request's tree: drafts at most, levels, nodes a level.

    A grown node takes one place in the request's K/V after its last token: the root place 0, node b
    of level i place 1 + (i - 1) * beam + b. They fit into the places of the drafts.
    """

    drafts: int
    depth: int
    beam: int

    @classmethod
    def of(cls, drafts: int, depth: int, branching: int) -> Plot:
        depth = min(depth, drafts)
        beam = branching if depth < 2 else min(branching, drafts // (depth - 1))
        return cls(drafts, depth, beam)

    def places(self, level: int) -> range:
        """Places of the nodes of a level: 0 is the root's."""
        if level == 0:
            return range(1)
        first = 1 + (level - 1) * self.beam
        return range(first, first + self.beam)


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one level over all requests that go so deep: N nodes, request after request.

    rows, beams, places: (N) host numbers of each one's request, place in the beam, place in K/V.
    tokens: (N,) int64. source: (N,) int64, the node of the level before that each grew from.
    ancestors: (N,) int64 masks over places.
    """

    number: int
    rows: tuple[int, ...]
    beams: tuple[int, ...]
    places: tuple[int, ...]
    tokens: torch.Tensor
    source: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True, slots=True)
class Grown:
    """One request's drafts: tokens, parents (0 the root, j the j-th draft), and the probability of
    each after its parent."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    confidence: tuple[float, ...]


NOTHING = Grown((), (), ())


class Forest:
    """The growing trees of B requests: `level` is to be scored, `grow` takes the scores."""

    def __init__(self, plots: Sequence[Plot], roots: torch.Tensor) -> None:
        """roots: (B,) int64, the last token of each request."""
        self.plots = plots
        count, device = len(plots), roots.device
        # By request and place in the beam: log-probability of the path, number as a candidate.
        self._worth = torch.zeros(count, 1, device=device)
        self._candidate = torch.full((count, 1), -1, device=device)
        self._scored: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        numbers = torch.arange(count, device=device)
        self.level = Level(
            number=0,
            rows=tuple(range(count)),
            beams=(0,) * count,
            places=(0,) * count,
            tokens=roots,
            source=numbers,
            ancestors=torch.ones_like(numbers),
        )

    def grow(self, ids: torch.Tensor, scores: torch.Tensor) -> Level | None:
        """Children of the level's nodes: (N, k) int64 ids, best first, and log-probabilities.

        Returns the next level, or None where no request goes deeper.
        """
        here, branching, device = self.level, ids.shape[1], ids.device
        row, beam = torch.tensor((here.rows, here.beams), device=device)
        shape = (*self._worth.shape, branching)
        worth = torch.full(shape, MINUS_INFINITY, device=device)
        worth[row, beam] = scores + self._worth[row, beam][:, None]
        tokens = ids.new_zeros(shape)
        tokens[row, beam] = ids
        parents = self._candidate[:, :, None].expand(shape)
        first = sum(level[0].shape[1] for level in self._scored)
        self._scored.append((tokens.flatten(1), worth.flatten(1), parents.flatten(1)))
        number = here.number + 1
        deeper = [r for r, plot in enumerate(self.plots) if plot.depth > number]
        if not deeper:
            return None
        self._worth, best = worth.flatten(1).topk(max(self.plots[r].beam for r in deeper))
        self._candidate = best + first
        node_of = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        node_of[row, beam] = torch.arange(len(here.rows), device=device)
        nodes = [(r, *node) for r in deeper for node in enumerate(self.plots[r].places(number))]
        row, beam, place = torch.tensor(nodes, device=device).unbind(1)
        chosen = best[row, beam]
        source = node_of[row, chosen // branching]
        rows, beams, places = zip(*nodes, strict=True)
        self.level = Level(
            number=number,
            rows=rows,
            beams=beams,
            places=places,
            tokens=tokens.flatten(1)[row, chosen],
            source=source,
            ancestors=here.ancestors[source] | (torch.ones_like(source) << place),
        )
        return self.level

    def drafts(self) -> list[Grown | None]:
        """Each request's best candidates.

        None for a request with a score that is no number: nothing of it can be ranked.
        """
        tokens, worth, parents = (
            torch.cat([level[i] for level in self._scored], 1) for i in range(3)
        )
        broken = worth.isnan().any(1).tolist()
        # Stable: of equals the earlier, so that no child is taken without its parent.
        ranked = worth.sort(dim=1, descending=True, stable=True)
        best = ranked.indices[:, : max(plot.drafts for plot in self.plots)]
        real = (ranked.values > MINUS_INFINITY).sum(1).tolist()
        table = torch.stack((best, tokens.gather(1, best), parents.gather(1, best)), 2).tolist()
        paths = ranked.values[:, : best.shape[1]].tolist()
        rows = zip(self.plots, table, paths, real, broken, strict=True)
        return [
            None if bad else _numbered(list(zip(row, path, strict=True))[: min(plot.drafts, count)])
            for plot, row, path, count, bad in rows
        ]


def _numbered(kept: list[tuple[list[int], float]]) -> Grown:
    """((candidate, token, parent candidate), worth) in order of worth, by number instead."""
    kept = sorted(kept)
    number, worth = {-1: 0}, {-1: 0.0}
    for j, ((candidate, _, _), path) in enumerate(kept, start=1):
        number[candidate], worth[candidate] = j, path
    return Grown(
        tokens=tuple(token for (_, token, _), _ in kept),
        parents=tuple(number[parent] for (_, _, parent), _ in kept),
        confidence=tuple(math.exp(min(path - worth[parent], 0.0)) for (_, _, parent), path in kept),
    )
