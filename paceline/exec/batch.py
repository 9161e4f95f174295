"""The ragged batch: one step's tokens on the device, whatever they are there for.

T tokens in R rows, one row a request: a prompt's chunk, a decode's single token, or such a token
with its drafts. Built from a plan, used by one forward pass, dropped.

    row r = tokens bounds[r] .. bounds[r + 1]; the last given one is where a token is sampled
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from paceline.attention.base import TREE_WIDTH, AttentionView
from paceline.exec.slots import Slots
from paceline.model.sampling import SamplingView
from paceline.plan.step import Row, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """Device tensors of one step. T tokens, R rows, S of them sample.

    tokens: (T,) int64. view: what the kernels need (a tile is a row, or 64 tokens of a short one).
    slots: (R,) int64. ends: (R,) int64, committed length after the row's given tokens.
    sample_index: (S,) int64, token at which each sampling row samples; sample_rows: (S,) int64, its
    row. sampling: sampling state of these S rows.
    """

    tokens: torch.Tensor
    view: AttentionView
    slots: torch.Tensor
    ends: torch.Tensor
    sample_index: torch.Tensor
    sample_rows: torch.Tensor
    sampling: SamplingView

    @classmethod
    def build(cls, plan: StepPlan, slots: Slots) -> RaggedBatch:
        """Lay the plan's rows out. Positions and last tokens come from the slots, on the device."""
        rows, device = plan.rows, slots.length.device
        bounds = tuple(accumulate((row.given for row in rows), initial=0))
        columns = _token_columns(rows).to(device, non_blocking=True)
        row_of, offset, given = columns
        row_slots = _ints([row.slot for row in rows], device)
        starts = slots.length[row_slots]  # (R,)
        token_slots = row_slots[row_of]
        positions = starts[row_of] + offset
        tokens = torch.where(given >= 0, given, slots.last_token[token_slots])
        page_size = plan.reservation.page_size
        page = slots.pages[token_slots, positions // page_size].long()
        sampling_rows = [i for i, row in enumerate(rows) if row.samples]
        sample_index = _ints([bounds[i + 1] - 1 for i in sampling_rows], device)
        view = AttentionView(
            positions=positions,
            cache_index=page * page_size + positions % page_size,
            ancestors=_CHAIN.to(device)[offset.clamp(max=TREE_WIDTH - 1)],
            tile_starts=torch.tensor(bounds, dtype=torch.int32, device=device),
            contexts=starts.int(),
            pages=slots.pages[row_slots],
            bounds=bounds,
        )
        return cls(
            tokens=tokens,
            view=view,
            slots=row_slots,
            ends=starts + (view.tile_starts[1:] - view.tile_starts[:-1]),
            sample_index=sample_index,
            sample_rows=_ints(sampling_rows, device),
            sampling=_sampling_view(rows, sampling_rows, slots, positions[sample_index] + 1),
        )


# Row i of a chain sees itself and what came before: bits 0 .. i.
_CHAIN = torch.tensor([(2 << i) - 1 if i < 63 else -1 for i in range(TREE_WIDTH)])


def _ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _token_columns(rows: tuple[Row, ...]) -> torch.Tensor:
    """(3, T) int64: row of each token, offset in its row, the given token or -1."""
    row_of: list[int] = []
    offset: list[int] = []
    given: list[int] = []
    for i, row in enumerate(rows):
        row_of += [i] * row.given
        offset += range(row.given)
        given += row.tokens or (-1,)
    return torch.tensor((row_of, offset, given), dtype=torch.int64)


def _sampling_view(
    rows: tuple[Row, ...], which: list[int], slots: Slots, positions: torch.Tensor
) -> SamplingView:
    """Gather the sampling state of the rows that sample, and see what work it asks for."""
    numbers = [rows[i].slot for i in which]
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
