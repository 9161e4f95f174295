"""The executor: one plan in, one result out, by way of the device.

The story of a step, whatever its depth:

    slots.prepare(plan)                     new tenants, new pages
    batch = RaggedBatch.build(plan, slots)  tokens, positions, who sees whom
    hidden = target.forward(batch)          writes K/V
    chosen = choose(logits)                 where a token may be sampled
    slots.commit(...)                       the only place where a sequence advances

Knows no request: rows of a plan and slots only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.attention.base import Kernels
from paceline.exec.batch import RaggedBatch
from paceline.exec.slots import Slots
from paceline.model.llama import LlamaModel
from paceline.model.sampling import choose
from paceline.plan.step import RowResult, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Executor:
    """A target model with its K/V storage (one tensor a layer) and slot tables on one device."""

    model: LlamaModel
    kernels: Kernels
    caches: Sequence[torch.Tensor]
    slots: Slots

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its tokens."""
        started = time.perf_counter()
        self.slots.prepare(plan)
        batch = RaggedBatch.build(plan, self.slots)
        step = self.kernels.begin(batch.view)
        hidden = self.model.forward(batch.tokens, step, self.caches)
        last = batch.tokens.new_zeros(len(batch.slots))
        if batch.sampling.seeds.numel():
            logits = self.model.logits(hidden[batch.sample_index], step)
            last[batch.sample_rows] = choose(logits, batch.sampling, self.kernels)
        self.slots.commit(batch.slots, batch.ends, last)
        tokens = last.tolist()
        rows = tuple(
            RowResult(tokens=(token,) if row.samples else ())
            for row, token in zip(plan.rows, tokens, strict=True)
        )
        return StepResult(plan=plan, rows=rows, seconds=time.perf_counter() - started)
