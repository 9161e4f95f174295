"""The one rule of acceptance: walk from the root to the child that equals what would be sampled.

At every node of a request's drafts the target says what it would sample there (`y`, see
`paceline.model.sampling`). The walk starts at the root, steps to the child whose token equals y,
and stops where there is none; the y of the last node is the bonus token. So what is committed is
what plain decoding commits, for chains and trees, greedy and sampled; with no drafts this is
sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTable:
    """Drafts of S sampling rows, at most W each; node 0 is the row's last given token.

    tokens: (S, W) int64. parents: (S, W) int64, the node that draft j (node j + 1) follows; -1
    where there is no draft.
    """

    tokens: torch.Tensor
    parents: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What each row commits.

    tokens: (S, depth + 1) int64; the first `accepted` + 1 of a row are committed.
    accepted: (S,) int64, drafts accepted. path: (S, depth) int64, their nodes, -1 beyond.
    last: (S,) int64, the last committed token, the bonus.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    path: torch.Tensor
    last: torch.Tensor

    @classmethod
    def none(cls, device: torch.device) -> Verdict:
        """Of no row: a step of inner chunks samples nothing."""
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return cls(tokens=empty[:, None], accepted=empty, path=empty.view(0, 0), last=empty)


def accept(chosen: torch.Tensor, drafts: DraftTable, depth: int) -> Verdict:
    """chosen: (S, W + 1) int64, y at each node of each row (anything where there is no node)."""
    node = torch.zeros_like(chosen[:, 0])
    going = torch.ones_like(node, dtype=torch.bool)
    last = chosen[:, 0]
    tokens, path = [last], []
    for _ in range(depth):
        fits = (drafts.parents == node[:, None]) & (drafts.tokens == last[:, None])
        going = going & fits.any(1)
        node = torch.where(going, fits.int().argmax(1) + 1, node)
        last = torch.where(going, chosen.gather(1, node[:, None])[:, 0], last)
        path.append(torch.where(going, node, -1))
        tokens.append(last)
    nodes = torch.stack(path, 1) if path else chosen.new_zeros(len(chosen), 0)
    return Verdict(
        tokens=torch.stack(tokens, 1),
        accepted=(nodes >= 0).sum(1),
        path=nodes,
        last=last,
    )
