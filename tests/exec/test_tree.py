"""Draft trees against a search that knows no tensors, on scores that are a hash of the path."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.exec.tree import Forest, Plot

Path = tuple[int, ...]


def children(root: int, path: Path, branching: int) -> list[tuple[int, float]]:
    """(token, log-probability) of the best children, best first; all different."""
    rng = random.Random(hash((root, *path)))
    scores = sorted((-rng.random() * 3 - 0.01 for _ in range(branching)), reverse=True)
    return list(zip(rng.sample(range(1000), branching), scores, strict=True))


def searched(root: int, plot: Plot, branching: int) -> list[tuple[float, Path]]:
    """The best candidates, by worth."""
    beam: list[tuple[float, Path]] = [(0.0, ())]
    scored: list[tuple[float, Path]] = []
    for _ in range(plot.depth):
        grown = [
            (worth + score, (*path, token))
            for worth, path in beam
            for token, score in children(root, path, branching)
        ]
        scored += grown
        beam = sorted(grown, reverse=True)[: plot.beam]
    return sorted(scored, reverse=True)[: plot.drafts]


def grown(roots: Sequence[int], plots: Sequence[Plot], branching: int) -> list[list[Path]]:
    """Paths of each request's drafts, grown level by level."""
    forest = Forest(plots, torch.tensor(roots))
    level = forest.level
    paths: list[Path] = [() for _ in roots]
    seen: list[dict[int, Path]] = [{} for _ in roots]  # path by place
    while True:
        scored = [
            children(roots[row], path, branching)
            for row, path in zip(level.rows, paths, strict=True)
        ]
        for i, (row, place, path) in enumerate(zip(level.rows, level.places, paths, strict=True)):
            seen[row][place] = path
            mask = int(level.ancestors[i])  # the places that the node sees spell its path
            on_path = [seen[row][p] for p in range(place + 1) if mask >> p & 1]
            assert on_path == [path[:n] for n in range(len(path) + 1)]
        ids = torch.tensor([[token for token, _ in each] for each in scored])
        scores = torch.tensor([[score for _, score in each] for each in scored])
        following = forest.grow(ids, scores)
        if following is None:
            break
        sources = following.source.tolist()
        assert all(level.rows[s] == r for s, r in zip(sources, following.rows, strict=True))
        paths = [
            (*paths[source], token)
            for source, token in zip(sources, following.tokens.tolist(), strict=True)
        ]
        level = following
    result = []
    for each in forest.drafts():
        assert each is not None
        tokens, parents = each.tokens, each.parents
        assert all(0 < sure <= 1 for sure in each.confidence)
        spelled: list[Path] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            assert parent < len(spelled)
            spelled.append((*spelled[parent], token))
        result.append(spelled[1:])
    return result


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 8),
    branching=st.integers(1, 8),
    drafts=st.lists(st.integers(1, 63), min_size=1, max_size=5),
    seed=st.integers(0, 999),
)
def test_the_best_candidates_of_a_beam_search(
    depth: int, branching: int, drafts: list[int], seed: int
) -> None:
    plots = [Plot.of(count, depth, branching) for count in drafts]
    roots = [seed + i for i in range(len(plots))]
    for root, plot, paths in zip(roots, plots, grown(roots, plots, branching), strict=True):
        assert sorted(paths) == sorted(path for _, path in searched(root, plot, branching))


def test_of_equals_no_child_comes_without_its_parent() -> None:
    """Probabilities of exactly one: a child is worth as much as its parent."""
    plot = Plot.of(5, 4, 2)
    forest = Forest([plot], torch.tensor([0]))
    number = 0
    while True:
        count = len(forest.level.rows)
        ids = torch.arange(number, number + 2 * count).view(count, 2)
        number += 2 * count
        if forest.grow(ids, torch.zeros(count, 2)) is None:
            break
    (only,) = forest.drafts()
    assert only is not None
    assert len(only.tokens) == 5 and only.confidence == (1.0,) * 5
    assert all(parent <= j for j, parent in enumerate(only.parents))


def test_scores_that_are_no_numbers_make_no_drafts() -> None:
    forest = Forest([Plot.of(2, 1, 2)], torch.tensor([0]))
    assert forest.grow(torch.tensor([[1, 2]]), torch.tensor([[torch.nan, 0.0]])) is None
    assert forest.drafts() == [None]


def test_broken_scores_are_their_own_requests_affair() -> None:
    forest = Forest([Plot.of(2, 1, 2)] * 2, torch.tensor([0, 1]))
    forest.grow(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[torch.nan, 0.0], [-1.0, -2.0]]))
    broken, only = forest.drafts()
    assert broken is None and only is not None
    assert (only.tokens, only.parents) == ((3, 4), (0, 0))
    assert only.confidence == pytest.approx((math.exp(-1), math.exp(-2)))


def test_confidence_is_each_ones_own_not_the_paths() -> None:
    forest = Forest([Plot.of(2, 2, 1)], torch.tensor([0]))
    assert forest.grow(torch.tensor([[7]]), torch.tensor([[math.log(0.5)]])) is not None
    forest.grow(torch.tensor([[8]]), torch.tensor([[math.log(0.25)]]))
    (only,) = forest.drafts()
    assert only is not None and only.confidence == pytest.approx((0.5, 0.25))
