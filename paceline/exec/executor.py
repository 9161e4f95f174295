"""The executor: one plan in, one result out, by way of the device.

The story of a step, whatever its depth:

    slots.prepare(plan)                             new tenants, new pages
    drafts = drafter.propose(plan, slots)           nothing at depth 0
    batch = RaggedBatch.build(plan, drafts, slots)  tokens, positions, who sees whom
    hidden, features = model.forward(batch)         writes K/V
    chosen = choose(logits)                         what is sampled at every node
    verdict = accept(chosen, drafts)                with no drafts this is sampling
    drafter.upkeep(batch, features, verdict)        the drafter's own K/V, of every token
    slots.commit(...)                               the only place where a sequence advances

Knows no request: rows of a plan and slots only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.attention.base import Kernels, Step
from paceline.exec.batch import RaggedBatch
from paceline.exec.drafter import Drafter, Drafts, NoDrafter, walked
from paceline.exec.slots import Slots
from paceline.model.accept import Verdict, accept
from paceline.model.llama import LlamaModel
from paceline.model.sampling import choose
from paceline.plan.step import RowResult, StepPlan, StepResult

logger = logging.getLogger("paceline")


@dataclass(slots=True)
class Executor:
    """A target model with its K/V storage (one tensor a layer), slot tables and drafter.

    drafter_failures: times that the drafter failed; steps then go without drafts.
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
        hidden, features = self.model.forward(
            batch.tokens, step, self.caches, self.drafter.boundaries
        )
        verdict = self._judge(batch, hidden, step)
        self._upkeep(batch, features, verdict)
        if batch.moves:
            self._move_accepted(batch, verdict)
        lengths = batch.ends.index_add(0, batch.sample_rows, verdict.accepted)
        last = torch.zeros_like(lengths).index_copy(0, batch.sample_rows, verdict.last)
        self.slots.commit(batch.slots, lengths, last)
        results = self._results(plan, drafts, batch, verdict)
        return StepResult(plan=plan, rows=results, seconds=time.perf_counter() - started)

    def _judge(self, batch: RaggedBatch, hidden: torch.Tensor, step: Step) -> Verdict:
        """What is sampled at every node, and how far each row's drafts agree with it."""
        if not len(batch.sample_rows):
            return Verdict.none(hidden.device)
        logits = self.model.logits(hidden[batch.sample_index], step)
        chosen = choose(logits, batch.sampling, self.kernels)
        return accept(chosen[batch.nodes], batch.drafts, batch.depth)

    def _propose(self, plan: StepPlan) -> Drafts:
        """The drafter's drafts; none if it fails: a drafter can never harm a request."""
        try:
            for admission in plan.admissions:
                self.drafter.admit(admission)
            drafts = self.drafter.propose(plan, self.slots)
            return drafts.within(plan, self.model.config.vocab_size)
        except Exception:
            self._drafter_failed()
            return Drafts.none(plan)

    def _upkeep(self, batch: RaggedBatch, features: torch.Tensor, verdict: Verdict) -> None:
        try:
            self.drafter.upkeep(batch, features, verdict)
        except Exception:
            self._drafter_failed()

    def _drafter_failed(self) -> None:
        """Count it; the log hears of the first."""
        self.drafter_failures += 1
        if self.drafter_failures == 1:
            logger.exception("the %s drafter failed; going on without", self.drafter.name)

    def _results(
        self, plan: StepPlan, drafts: Drafts, batch: RaggedBatch, verdict: Verdict
    ) -> tuple[RowResult, ...]:
        outcomes = zip(
            verdict.tokens.tolist(), verdict.accepted.tolist(), verdict.path.tolist(), strict=True
        )
        results = []
        for row, parents, levels in zip(plan.rows, drafts.parents, batch.levels, strict=True):
            tokens, accepted, path = next(outcomes) if row.samples else ([], -1, [])
            results.append(
                RowResult(
                    tokens=tuple(tokens[: accepted + 1]),
                    levels=levels,
                    walk=walked(parents, path[: max(accepted, 0)]),
                )
            )
        try:
            for row, result in zip(plan.rows, results, strict=True):
                self.drafter.observe(row, result)
        except Exception:
            self._drafter_failed()
        return tuple(results)

    def _move_accepted(self, batch: RaggedBatch, verdict: Verdict) -> None:
        """Bring the K/V of accepted tree nodes to where a chain would have written it."""
        walk = batch.walk(verdict)
        now = batch.view.cache_index[walk.tokens]
        moved = (walk.places >= 0) & (now != walk.places)
        source, target = now[moved], walk.places[moved]
        if not len(source):
            return
        for cache in (*self.caches, *self.drafter.caches):
            size = cache.shape[3]
            kept = cache[source // size, :, :, source % size]
            cache[target // size, :, :, target % size] = kept
