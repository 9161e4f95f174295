"""The ragged batch: one step's tokens on the device, whatever they are there for.

T tokens in R rows, one row a request: a prompt's chunk, a decode's single token, or such a token
with its drafts. Built from a plan and its drafts, used by one forward pass, dropped.

    row r = tokens bounds[r] .. bounds[r + 1]: the given ones, then the drafts
    nodes of a row that samples: its last given token (node 0, the root) and its drafts (1, 2, ...)

Token i of a row has its K/V at cache position start + i; its position in the text is the same but
in a tree, where siblings share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from paceline.attention.base import AttentionView
from paceline.exec.drafter import Drafts, counts_by_level, levels_of
from paceline.exec.slots import Slots
from paceline.model.accept import DraftTable, Verdict
from paceline.model.sampling import SamplingView
from paceline.plan.step import Row, StepPlan
from paceline.types import TREE_WIDTH

# Ancestor masks of a chain: token i sees itself and what came before, bits 0 .. i.
_CHAIN = [(2 << i) - 1 if i < 63 else -1 for i in range(TREE_WIDTH)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """Device tensors of one step. T tokens, R rows, S of them sample, at N nodes in all.

    tokens: (T,) int64. view: what the kernels need; a tile is a row.
    parents: (T,) int64, the token before each in its text: T + row for a row's first.
    slots: (R,) int64. ends: (R,) int64, committed length after the row's given tokens.
    given: (G,) int64, tokens that are no drafts. last_given: (R,) int64, the last one of each row.
    sample_rows: (S,) int64. sample_index: (N,) int64, token of each node, row after row.
    nodes: (S, W + 1) int64, place of each row's nodes among the N (that of its root where it has
    no such node). drafts: as (S, W) tables. depth: levels of the deepest row.
    sampling: sampling state of the N nodes.
    moves: some accepted drafts may lie elsewhere than where a chain would have them.
    levels: drafts of each row at each level, for the record.
    """

    tokens: torch.Tensor
    view: AttentionView
    parents: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    given: torch.Tensor
    last_given: torch.Tensor
    sample_rows: torch.Tensor
    sample_index: torch.Tensor
    nodes: torch.Tensor
    drafts: DraftTable
    depth: int
    sampling: SamplingView
    moves: bool
    levels: tuple[tuple[int, ...], ...]
    page_size: int

    @classmethod
    def build(cls, plan: StepPlan, drafts: Drafts, slots: Slots) -> RaggedBatch:
        """Lay rows and drafts out. Starts and last tokens come from the slots, on the device."""
        rows, device = plan.rows, slots.length.device
        levels = tuple(levels_of(parents) for parents in drafts.parents)
        widths = [row.given + len(tokens) for row, tokens in zip(rows, drafts.tokens, strict=True)]
        bounds = tuple(accumulate(widths, initial=0))
        columns = _token_columns(rows, drafts, levels).to(device, non_blocking=True)
        row_of, place, offset, given, ancestors, parents = columns
        is_given = [
            at for b, row in zip(bounds, rows, strict=False) for at in range(b, b + row.given)
        ]
        row_slots = _ints([row.slot for row in rows], device)
        starts = slots.length[row_slots]  # (R,)
        token_slots, token_starts = row_slots[row_of], starts[row_of]
        places, positions = token_starts + place, token_starts + offset
        page_size = plan.reservation.page_size
        page = slots.pages[token_slots, places // page_size].long()
        sampling = [i for i, row in enumerate(rows) if row.samples]
        counts = [1 + len(drafts.tokens[i]) for i in sampling]
        index = [at for i in sampling for at in range(bounds[i] + rows[i].given - 1, bounds[i + 1])]
        sample_index = _ints(index, device)
        return cls(
            tokens=torch.where(given >= 0, given, slots.last_token[token_slots]),
            view=AttentionView(
                positions=positions,
                cache_index=page * page_size + places % page_size,
                ancestors=ancestors.contiguous(),
                tile_starts=torch.tensor(bounds, dtype=torch.int32, device=device),
                contexts=starts.int(),
                pages=slots.pages[row_slots],
                bounds=bounds,
                tails=_ints(widths, device).int(),
            ),
            parents=parents,
            slots=row_slots,
            ends=starts + _ints([row.given for row in rows], device),
            given=_ints(is_given, device),
            last_given=_ints(
                [b + row.given - 1 for b, row in zip(bounds, rows, strict=False)], device
            ),
            sample_rows=_ints(sampling, device),
            sample_index=sample_index,
            nodes=_node_table(counts).to(device),
            drafts=_draft_table(drafts, sampling, device),
            depth=max((max(level, default=0) for level in levels), default=0),
            sampling=sampling_view(
                [rows[i].slot for i, n in zip(sampling, counts, strict=True) for _ in range(n)],
                slots,
                positions[sample_index] + 1,
            ),
            moves=any(p != tuple(range(len(p))) for p in drafts.parents),
            levels=tuple(counts_by_level(level) for level in levels),
            page_size=page_size,
        )

    def walk(self, verdict: Verdict) -> Walk:
        """Which tokens a verdict commits: the given ones and, of the drafts, the accepted."""
        if not self.depth:
            places = self.view.cache_index  # all are given, in order
            return Walk(tokens=self.given, places=places, last=self.last_given)
        path = verdict.path  # (S, depth)
        tokens = self.sample_index[self.nodes.gather(1, path.clamp(min=0))]
        order = torch.arange(path.shape[1], device=path.device)
        at = self.ends[self.sample_rows, None] + order
        table = self.view.pages[self.sample_rows]
        page = table.gather(1, (at // self.page_size).clamp(max=table.shape[1] - 1)).long()
        places = torch.where(path < 0, -1, page * self.page_size + at % self.page_size)
        ends = torch.cat((self.last_given[self.sample_rows, None], tokens), 1)
        last = ends.gather(1, verdict.accepted[:, None])[:, 0]
        return Walk(
            tokens=torch.cat((self.given, tokens.flatten())),
            places=torch.cat((self.view.cache_index[self.given], places.flatten())),
            last=self.last_given.index_copy(0, self.sample_rows, last),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The tokens of a batch that are committed: C candidates, all given ones among them.

    tokens: (C,) int64, which of the batch's tokens. places: (C,) int64, where their K/V belongs (as
    `cache_index`); -1: not accepted. last: (R,) int64, the last committed token of each row.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    last: torch.Tensor


def _ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _masks(parents: tuple[int, ...]) -> list[int]:
    """Ancestor masks of the drafts of a row with one given token, as signed 64-bit numbers."""
    masks = [1]
    for node, parent in enumerate(parents, start=1):
        masks.append(masks[parent] | (1 << node))
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks[1:]]


def _token_columns(
    rows: tuple[Row, ...], drafts: Drafts, levels: tuple[list[int], ...]
) -> torch.Tensor:
    """(6, T) int64: row, place in the row, offset of its position from the row's start, the token
    if the host knows it or -1, ancestor mask, which token comes before it (T + row: the first)."""
    total = sum(row.given + len(tokens) for row, tokens in zip(rows, drafts.tokens, strict=True))
    row_of: list[int] = []
    place: list[int] = []
    offset: list[int] = []
    given: list[int] = []
    masks: list[int] = []
    before: list[int] = []
    for i, row in enumerate(rows):
        guessed, parents = drafts.tokens[i], drafts.parents[i]
        assert not guessed or row.given == 1, "drafts follow a single given token"
        count = row.given + len(guessed)
        row_of += [i] * count
        place += range(count)
        offset += range(row.given)
        offset += levels[i]
        given += row.tokens or (-1,)
        given += guessed
        masks += _CHAIN[: row.given] + [0] * (row.given - TREE_WIDTH) + _masks(parents)
        first = len(before)
        before.append(total + i)
        before += range(first, first + row.given - 1)
        before += [first + row.given - 1 + parent for parent in parents]
    return torch.tensor((row_of, place, offset, given, masks, before), dtype=torch.int64)


def _node_table(counts: list[int]) -> torch.Tensor:
    """(S, most nodes of a row) int64: place of each node; the root's where a row has fewer."""
    most = max(counts, default=1)
    table, root = [], 0
    for count in counts:
        table.append([root + (node if node < count else 0) for node in range(most)])
        root += count
    return torch.tensor(table, dtype=torch.int64).view(len(counts), most)


def _draft_table(drafts: Drafts, rows: list[int], device: torch.device) -> DraftTable:
    most = max((len(drafts.tokens[i]) for i in rows), default=0)

    def table(values: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        padded = [values[i] + (-1,) * (most - len(values[i])) for i in rows]
        return torch.tensor(padded, dtype=torch.int64).view(len(rows), most).to(device)

    return DraftTable(tokens=table(drafts.tokens), parents=table(drafts.parents))


def sampling_view(numbers: list[int], slots: Slots, positions: torch.Tensor) -> SamplingView:
    """Gather the sampling state of the nodes' slots, and see what work it asks for."""
    params = [slots.params[slot] for slot in numbers]
    index = _ints(numbers, positions.device)
    return SamplingView(
        positions=positions,
        seeds=slots.seed[index],
        temperature=slots.temperature[index],
        top_p=slots.top_p[index],
        top_k=slots.top_k[index],
        min_p=slots.min_p[index],
        samples=any(p.temperature > 0 for p in params),
        filtered=tuple(
            i
            for i, p in enumerate(params)
            if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        ),
    )
