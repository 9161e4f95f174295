"""The executor: one plan in, one result out, by way of the device.

The story of a step, whatever its depth:

    slots.prepare(plan)                             new tenants, new pages
    drafts = drafter.propose(plan)                  nothing at depth 0
    batch = RaggedBatch.build(plan, drafts, slots)  tokens, positions, who sees whom
    hidden = model.forward(batch)                   writes K/V
    chosen = choose(logits)                         what is sampled at every node
    verdict = accept(chosen, drafts)                with no drafts this is sampling
    slots.commit(...)                               the only place where a sequence advances

Knows no request: rows of a plan and slots only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.attention.base import Kernels
from paceline.exec.batch import RaggedBatch
from paceline.exec.drafter import Drafter, Drafts, NoDrafter
from paceline.exec.slots import Slots
from paceline.model.accept import Verdict, accept
from paceline.model.llama import LlamaModel
from paceline.model.sampling import choose
from paceline.plan.step import RowResult, StepPlan, StepResult

logger = logging.getLogger("paceline")


@dataclass(slots=True)
class Executor:
    """A target model with its K/V storage (one tensor a layer), slot tables and drafter.

    drafter_failures: steps that went without drafts because the drafter failed.
    """

    model: LlamaModel
    kernels: Kernels
    caches: Sequence[torch.Tensor]
    slots: Slots
    drafter: Drafter = field(default_factory=NoDrafter)
    drafter_failures: int = 0

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its tokens."""
        started = time.perf_counter()
        self.slots.prepare(plan)
        drafts = self._propose(plan)
        batch = RaggedBatch.build(plan, drafts, self.slots)
        step = self.kernels.begin(batch.view)
        hidden = self.model.forward(batch.tokens, step, self.caches)
        lengths, last = batch.ends, torch.zeros_like(batch.ends)
        outcome: list[tuple[int, ...]] = []
        if len(batch.sample_rows):
            logits = self.model.logits(hidden[batch.sample_index], step)
            chosen = choose(logits, batch.sampling, self.kernels)
            verdict = accept(chosen[batch.nodes], batch.drafts, batch.depth)
            if batch.moves:
                self._move_accepted(batch, verdict)
            lengths = lengths.index_add(0, batch.sample_rows, verdict.accepted)
            last = last.index_copy(0, batch.sample_rows, verdict.last)
            rows = zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True)
            outcome = [tuple(tokens[: accepted + 1]) for tokens, accepted in rows]
        self.slots.commit(batch.slots, lengths, last)
        results = self._results(plan, drafts, outcome)
        return StepResult(plan=plan, rows=results, seconds=time.perf_counter() - started)

    def _propose(self, plan: StepPlan) -> Drafts:
        """The drafter's drafts; none if it fails: a drafter can never harm a request."""
        try:
            for admission in plan.admissions:
                self.drafter.admit(admission)
            return self.drafter.propose(plan).within(plan, self.model.config.vocab_size)
        except Exception:
            self._drafter_failed()
            return Drafts.none(plan)

    def _drafter_failed(self) -> None:
        """Count it; the log hears of the first."""
        self.drafter_failures += 1
        if self.drafter_failures == 1:
            logger.exception("the %s drafter failed; going on without", self.drafter.name)

    def _results(
        self, plan: StepPlan, drafts: Drafts, outcome: list[tuple[int, ...]]
    ) -> tuple[RowResult, ...]:
        waiting = iter(outcome)
        results = []
        for row, tokens in zip(plan.rows, drafts.tokens, strict=True):
            committed = next(waiting) if row.samples else ()
            results.append(RowResult(tokens=committed, drafted=len(tokens)))
        try:
            for row, result in zip(plan.rows, results, strict=True):
                self.drafter.observe(row, result)
        except Exception:
            self._drafter_failed()
        return tuple(results)

    def _move_accepted(self, batch: RaggedBatch, verdict: Verdict) -> None:
        """Bring the K/V of accepted tree nodes to where a chain would have written it."""
        rows = batch.sample_rows
        starts, pages = batch.view.contexts[rows].long(), batch.view.pages[rows]
        order = torch.arange(1, verdict.path.shape[1] + 1, device=rows.device)
        row, level = ((verdict.path >= 0) & (verdict.path != order)).nonzero(as_tuple=True)
        size = self.caches[0].shape[3]

        def places(node: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            at = starts[row] + node
            return pages[row, at // size].long(), at % size

        (from_page, from_offset), (page, offset) = (
            places(verdict.path[row, level]),
            places(level + 1),
        )
        for cache in self.caches:
            cache[page, :, :, offset] = cache[from_page, :, :, from_offset]
