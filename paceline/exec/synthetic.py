"""Synthetic acceptance: drafts are accepted by a draw, not by what the target would sample.

So throughput can be measured with random weights, whose drafts are never right. A node's first
child is accepted with probability `acceptance`; a further child catches a share of what those
before it miss (`child_rates`). The draw depends on the request's seed and the position alone. What
is generated is then no text of the target: everything that reports such a run says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from paceline.config import MAX_BRANCHING
from paceline.model import noise
from paceline.model.accept import DraftTable
from paceline.model.sampling import SamplingView
from paceline.plan.simulation import child_rates

APART = 0x5EED  # the draws are independent of the noise that samples tokens

Judge: TypeAlias = Callable[[torch.Tensor, torch.Tensor, DraftTable, SamplingView], torch.Tensor]
"""(N,) tokens sampled at the nodes, (S, W + 1) node of each place, drafts, sampling state of the
nodes -> (S, W + 1) tokens that count as right."""


def as_sampled(
    chosen: torch.Tensor, nodes: torch.Tensor, drafts: DraftTable, view: SamplingView
) -> torch.Tensor:
    """What was sampled is what is right."""
    return chosen[nodes]


def synthetic(acceptance: float, device: torch.device) -> Judge:
    """A judge that accepts by draws. acceptance: of first children, in [0, 1]."""
    rates = (0.0, *child_rates(acceptance, MAX_BRANCHING))
    bounds = torch.tensor(rates, device=device).cumsum(0)

    def judge(
        chosen: torch.Tensor, nodes: torch.Tensor, drafts: DraftTable, view: SamplingView
    ) -> torch.Tensor:
        right = chosen[nodes]
        if not drafts.tokens.shape[1]:
            return right
        parent, there = drafts.parents.clamp(min=0), drafts.parents >= 0
        siblings = (drafts.parents[:, :, None] == drafts.parents[:, None, :]) & there[:, :, None]
        rank = siblings.tril(-1).sum(2)  # (S, W), children of the same node before it
        draw = _draws(view)[nodes].gather(1, parent)
        wins = there & (bounds[rank] <= draw) & (draw < bounds[rank + 1])
        others = _no_child(right, drafts, parent, there)
        token = torch.where(wins, drafts.tokens, -1)
        found = torch.full_like(right, -1).scatter_reduce(1, parent, token, "amax")
        return torch.where(found >= 0, found, others)

    return judge


def _draws(view: SamplingView) -> torch.Tensor:
    """A uniform number for each node: (N,) float32."""
    keys = noise.row_keys(view.seeds ^ APART, view.positions)
    return noise.uniform(keys, torch.zeros(1, dtype=torch.int32, device=keys.device))[:, 0]


def _no_child(
    right: torch.Tensor, drafts: DraftTable, parent: torch.Tensor, there: torch.Tensor
) -> torch.Tensor:
    """`right`, or an id near it that is no child's where it is one's."""
    towards = torch.where(right > MAX_BRANCHING, -1, 1)
    for _ in range(MAX_BRANCHING):
        same = there & (drafts.tokens == right.gather(1, parent))
        taken = torch.zeros_like(right).scatter_reduce(1, parent, same.long(), "amax")
        right = torch.where(taken > 0, right + towards, right)
    return right
