from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.model.accept import DraftTable, accept


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 9))
def test_the_walk_follows_what_is_sampled(seed: int, rows: int, most: int) -> None:
    rng = random.Random(seed)
    tokens = [[-1] * most for _ in range(rows)]
    parents = [[-1] * most for _ in range(rows)]
    for row in range(rows):
        for j in range(rng.randrange(most + 1)):
            tokens[row][j] = rng.randrange(3)
            parents[row][j] = rng.randrange(j + 1)
    chosen = [[rng.randrange(3) for _ in range(most + 1)] for _ in range(rows)]
    table = DraftTable(
        tokens=torch.tensor(tokens).view(rows, most).long(),
        parents=torch.tensor(parents).view(rows, most).long(),
    )
    verdict = accept(torch.tensor(chosen), table, depth=most)
    for row in range(rows):
        node, path, committed = 0, [], [chosen[row][0]]
        while True:
            fits = [
                j + 1
                for j in range(most)
                if parents[row][j] == node and tokens[row][j] == chosen[row][node]
            ]
            if not fits:
                break
            node = fits[0]
            path.append(node)
            committed.append(chosen[row][node])
        accepted = int(verdict.accepted[row])
        assert accepted == len(path)
        assert verdict.path[row].tolist() == path + [-1] * (most - len(path))
        assert verdict.tokens[row, : accepted + 1].tolist() == committed
        assert verdict.last[row] == committed[-1]


def test_no_drafts_is_sampling() -> None:
    empty = DraftTable(
        tokens=torch.empty(2, 0, dtype=torch.int64), parents=torch.empty(2, 0, dtype=torch.int64)
    )
    verdict = accept(torch.tensor([[5], [6]]), empty, depth=0)
    assert verdict.tokens.tolist() == [[5], [6]] and verdict.accepted.tolist() == [0, 0]
