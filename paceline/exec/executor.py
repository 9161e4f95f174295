"""The executor: one plan in, one result out, by way of the device.

The story of a step, whatever its depth:

    slots.prepare(plan)                             new tenants, new pages
    proposed = drafter.propose(plan, slots)         nothing at depth 0
    drafts = proposed.best(plan)                    those that are worth their place
    batch = RaggedBatch.build(plan, drafts, slots)  tokens, positions, who sees whom
    hidden, features = target(batch)                writes K/V
    chosen = choose(logits)                         what is sampled at every node
    verdict = accept(chosen, drafts)                with no drafts this is sampling
    drafter.upkeep(batch, features, verdict)        the drafter's own K/V, of every token
    slots.commit(...)                               the only place where a sequence advances

Knows no request: rows of a plan and slots only.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.attention.base import Kernels, Step
from paceline.exec.batch import RaggedBatch
from paceline.exec.drafter import Drafter, Drafts, NoDrafter, walked
from paceline.exec.slots import Slots
from paceline.exec.synthetic import Judge, as_sampled
from paceline.exec.target import EagerPass, GraphedPass, TargetPass
from paceline.model.accept import Verdict, accept
from paceline.model.llama import LlamaModel
from paceline.model.sampling import choose
from paceline.plan.step import RowResult, StepPlan, StepResult

logger = logging.getLogger("paceline")

HOPELESS = 6  # failures in a row after which a drafter is called suspect
LONGEST_REST = 256  # steps


@dataclass(slots=True)
class Executor:
    """A target model with its K/V storage (one tensor a layer), slot tables and drafter.

    judge: which drafts are right. graphs: of the target's pass, if there are any. drafter_failures:
    times that the drafter failed; what it failed at goes without drafts, and a drafter that fails
    again and again is asked ever more seldom.
    """

    model: LlamaModel
    kernels: Kernels
    caches: Sequence[torch.Tensor]
    slots: Slots
    drafter: Drafter = field(default_factory=NoDrafter)
    judge: Judge = as_sampled
    graphs: GraphedPass | None = None
    drafter_failures: int = 0
    _lost: set[int] = field(default_factory=set)  # slots that the drafter failed to follow
    _failed_in_a_row: int = 0
    _rest: int = 0  # steps for which the drafter is not asked
    target: TargetPass = field(init=False)

    def __post_init__(self) -> None:
        eager = EagerPass(self.model, self.caches, self.drafter.boundaries)
        self.target = self.graphs or eager

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its tokens."""
        started = time.perf_counter()
        self.slots.prepare(plan)
        proposed = self._propose(plan)
        drafts = proposed.best(plan)
        batch = RaggedBatch.build(plan, drafts, self.slots)
        step = self.kernels.begin(batch.view)
        hidden, features = self.target(batch, step)
        verdict = self._judge(batch, hidden, step)
        self._upkeep(batch, features, verdict)
        if batch.moves:
            self._move_accepted(batch, verdict)
        lengths = batch.ends.index_add(0, batch.sample_rows, verdict.accepted)
        last = torch.zeros_like(lengths).index_copy(0, batch.sample_rows, verdict.last)
        self.slots.commit(batch.slots, lengths, last)
        results = self._results(plan, proposed, drafts, batch=batch, verdict=verdict)
        return StepResult(plan=plan, rows=results, seconds=time.perf_counter() - started)

    def _judge(self, batch: RaggedBatch, hidden: torch.Tensor, step: Step) -> Verdict:
        """What is sampled at every node, and how far each row's drafts agree with it."""
        if not len(batch.sample_rows):
            return Verdict.none(hidden.device)
        logits = self.model.logits(hidden[batch.sample_index], step)
        chosen = choose(logits, batch.sampling, self.kernels)
        right = self.judge(chosen, batch.nodes, batch.drafts, batch.sampling)
        return accept(right, batch.drafts, batch.depth)

    def _propose(self, plan: StepPlan) -> Drafts:
        """The drafter's drafts; none if it fails: a drafter can never harm a request."""
        for admission in plan.admissions:
            self._lost.discard(admission.slot)
            try:
                self.drafter.admit(admission)
            except Exception as error:
                self._lose(admission.slot, error)
        self._rest = max(self._rest - 1, 0)
        if self._rest or not any(row.drafts for row in plan.rows):
            return Drafts.none(plan)
        try:
            asked = self._without_lost(plan)
            drafts = self.drafter.propose(asked, self.slots)
            drafts = drafts.within(asked, self.model.config.vocab_size)
            if drafts.failed and not any(drafts.tokens):
                raise ValueError("its scores are not numbers")
        except Exception as error:
            self._failed_in_a_row += 1
            self._rest = min(1 << self._failed_in_a_row, LONGEST_REST)
            self._drafter_failed(error)
            return Drafts.none(plan)
        self._failed_in_a_row = 0
        if drafts.failed:
            self._drafter_failed(f"scores of {drafts.failed} requests are not numbers")
        return drafts

    def _without_lost(self, plan: StepPlan) -> StepPlan:
        """The plan with no drafts for slots whose text the drafter does not know."""
        if not self._lost:
            return plan
        rows = tuple(
            dataclasses.replace(row, drafts=0) if row.slot in self._lost else row
            for row in plan.rows
        )
        return dataclasses.replace(plan, rows=rows)

    def _upkeep(self, batch: RaggedBatch, features: torch.Tensor, verdict: Verdict) -> None:
        try:
            self.drafter.upkeep(batch, features, verdict)
        except Exception as error:
            self._drafter_failed(error)

    def _lose(self, slot: int, error: Exception) -> None:
        self._lost.add(slot)
        self._drafter_failed(error)

    def _drafter_failed(self, reason: object) -> None:
        """Count it; the log hears of the first."""
        self.drafter_failures += 1
        if self.drafter_failures == 1:
            kind = type(reason).__name__ + ": " if isinstance(reason, Exception) else ""
            logger.warning(
                "the %s drafter failed (%s%s); going on without", self.drafter.name, kind, reason
            )
            logger.debug("where it failed", exc_info=True)

    @property
    def drafter_rests(self) -> bool:
        """It failed so often in a row that it is hardly asked any more."""
        return self._failed_in_a_row >= HOPELESS

    def _results(
        self, plan: StepPlan, proposed: Drafts, drafts: Drafts, *, batch: RaggedBatch,
        verdict: Verdict,
    ) -> tuple[RowResult, ...]:  # fmt: skip
        """drafts: those of the proposed that were verified."""
        outcomes = zip(
            verdict.tokens.tolist(), verdict.accepted.tolist(), verdict.path.tolist(), strict=True
        )
        results = []
        rows = zip(
            plan.rows, drafts.parents, drafts.confidence, proposed.confidence, batch.levels,
            strict=True,
        )  # fmt: skip
        for row, parents, sure, all_of_them, levels in rows:
            tokens, accepted, path = next(outcomes) if row.samples else ([], -1, [])
            results.append(
                RowResult(
                    tokens=tuple(tokens[: accepted + 1]),
                    levels=levels,
                    walk=walked(parents, sure, path[: max(accepted, 0)]),
                    proposed=all_of_them,
                )
            )
        for row, result in zip(plan.rows, results, strict=True):
            if row.slot not in self._lost:
                try:
                    self.drafter.observe(row, result)
                except Exception as error:
                    self._lose(row.slot, error)
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
