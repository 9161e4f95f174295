"""The EAGLE-3 drafter: never behind, because the target's own pass keeps it up to date.

Its K/V is one more layer in the target's pages, entry q made of token q and the fused feature of
position q - 1, so that it is known as soon as q's parent is computed. `upkeep` writes the entries
of all rows of a step, drafts included; accepted ones are moved with the target's. What else it must
know of a text is one vector, the fused feature of the last committed position (`_roots`), and for
texts that start from cached pages that of each page's last position (`_page_features`). Hence
drafting may start or stop at any step at full acceptance. The first position has no parent: its
entry is hidden from everyone.

Knows slots, rows and pages; the network is `paceline.model.eagle`, the trees `paceline.exec.tree`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.attention.base import AttentionView, Kernels, KVLayout
from paceline.exec.batch import RaggedBatch, sampling_view
from paceline.exec.drafter import Drafts
from paceline.exec.slots import Slots
from paceline.exec.tree import NOTHING, Forest, Level, Plot
from paceline.model.accept import Verdict
from paceline.model.eagle import EagleModel
from paceline.model.sampling import temper
from paceline.plan.step import Admission, DraftShape, Row, RowResult, StepPlan


class EagleDrafter:
    """Implements `Drafter`. kernels: made for the drafter's own geometry."""

    name = "EAGLE-3"
    advice = "`paceline check-drafter` tells whether it fits the model and is read rightly"

    def __init__(self, model: EagleModel, kernels: Kernels, layout: KVLayout, slots: int) -> None:
        """layout: of the drafter's K/V, in as many pages as the target's. slots: how many."""
        device, width = model.ids.device, model.config.hidden_size
        dtype = torch.float32 if device.type == "cpu" else layout.dtype
        self.model = model
        self.kernels = kernels
        self.boundaries: Sequence[int] = model.config.boundaries
        self.caches: Sequence[torch.Tensor] = (layout.allocate(device),)
        self._roots = torch.zeros(slots, width, dtype=dtype, device=device)
        # Row `pages` takes what is no page's last position; the one after it, -1, stays zero.
        self._nowhere = layout.pages
        self._page_features = torch.zeros(layout.pages + 2, width, dtype=dtype, device=device)

    def admit(self, admission: Admission) -> None:
        self._roots[admission.slot] = self._page_features[admission.parent_page]

    def observe(self, row: Row, result: RowResult) -> None:
        pass

    # Keeping up -----------------------------------------------------------------------------------

    def upkeep(self, batch: RaggedBatch, features: torch.Tensor, verdict: Verdict) -> None:
        step = self.kernels.begin(batch.view)
        fused = self.model.fuse(features, step)
        before = torch.cat((fused, self._roots[batch.slots]))[batch.parents]
        self.model.write(batch.tokens, before, step, self.caches[0])
        walk = batch.walk(verdict)
        size = batch.page_size
        last = (walk.places >= 0) & (walk.places % size == size - 1)
        page = torch.where(last, walk.places // size, self._nowhere)
        self._page_features[page] = fused[walk.tokens]
        self._roots[batch.slots] = fused[walk.last]

    # Drafting -------------------------------------------------------------------------------------

    def propose(self, plan: StepPlan, slots: Slots) -> Drafts:
        numbers = [i for i, row in enumerate(plan.rows) if self._reaches(row, plan.shape)]
        if not numbers:
            return Drafts.none(plan)
        rows = [plan.rows[i] for i in numbers]
        shape = plan.shape
        branching = min(shape.branching, self.model.config.draft_vocab_size)
        plots = [Plot.of(row.drafts, shape.depth, branching) for row in rows]
        index = torch.tensor([row.slot for row in rows], device=self.model.ids.device)
        known = [row.tokens[0] if row.tokens else -1 for row in rows]
        given = torch.tensor(known, device=index.device)
        forest = Forest(plots, torch.where(given >= 0, given, slots.last_token[index]))
        states = self._roots[index]
        level: Level | None = forest.level
        while level is not None:
            states, level = self._level(forest, level, states, rows, slots, branching)
        grown = dict(zip(numbers, forest.drafts(), strict=True))
        drafts = [grown.get(i) or NOTHING for i in range(len(plan.rows))]
        return Drafts(
            tokens=tuple(each.tokens for each in drafts),
            parents=tuple(each.parents for each in drafts),
            confidence=tuple(each.confidence for each in drafts),
            failed=sum(each is None for each in grown.values()),
        )

    def _reaches(self, row: Row, shape: DraftShape) -> bool:
        """May it draft for this row? Not for a text's first token, nor past its positions."""
        end = row.start + min(shape.depth, row.drafts)
        return bool(row.drafts) and row.start > 0 and end <= self.model.config.max_position

    def _level(
        self,
        forest: Forest,
        level: Level,
        states: torch.Tensor,
        rows: Sequence[Row],
        slots: Slots,
        branching: int,
    ) -> tuple[torch.Tensor, Level | None]:
        """Score one level's children and grow the next, with what it takes as parents' states.

        states: (nodes of the level before, h); of the roots for the first.
        """
        view = self._view(level, forest.plots, rows, slots)
        step = self.kernels.begin(view)
        logits, states = self.model.forward(
            level.tokens, states[level.source], step, self.caches[0]
        )
        sampling = sampling_view([rows[r].slot for r in level.rows], slots, view.positions + 1)
        positions = temper(logits, sampling)
        if sampling.samples:
            self.kernels.add_noise(logits, self.model.ids, sampling.seeds, positions)
        best = logits.topk(branching)
        scores = best.values - logits.logsumexp(1, keepdim=True)
        return states, forest.grow(self.model.ids[best.indices].long(), scores)

    def _view(
        self, level: Level, plots: Sequence[Plot], rows: Sequence[Row], slots: Slots
    ) -> AttentionView:
        """A tile for each request that goes so deep; its tail is all that it has grown so far."""
        device = slots.length.device
        tiles = list(dict.fromkeys(level.rows))
        bounds, tails = [0], []
        for r in tiles:
            places = plots[r].places(level.number)
            bounds.append(bounds[-1] + len(places))
            tails.append(places.stop)
        index = torch.tensor([rows[r].slot for r in tiles], device=device)
        starts, pages = slots.length[index], slots.pages[index]
        tile_of = [t for t, r in enumerate(tiles) for _ in plots[r].places(level.number)]
        tile, place = torch.tensor((tile_of, level.places), device=device)
        at, size = starts[tile] + place, self.caches[0].shape[3]
        return AttentionView(
            positions=starts[tile] + level.number,
            cache_index=pages[tile, at // size].long() * size + at % size,
            ancestors=level.ancestors,
            tile_starts=torch.tensor(bounds, dtype=torch.int32, device=device),
            contexts=starts.int(),
            pages=pages,
            bounds=tuple(bounds),
            tails=torch.tensor(tails, dtype=torch.int32, device=device),
            hidden=1,
        )
