"""Device tables indexed by request slot: what a step must know of a request without the host.

Admission writes a slot's sampling state, a plan's page updates extend its page table, and `commit`
is the only place where a sequence advances. Fixed size, allocated once; nothing is ever resized,
filtered or merged. No host copy of lengths or tokens is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from paceline.plan.step import Admission, PageUpdate, StepPlan
from paceline.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass(slots=True)
class Slots:
    """S slots of up to P pages.

    length: (S,) int64, tokens whose K/V is committed. last_token: (S,) int64, the token after them.
    pages: (S, P) int32, page table. seed: (S,) int64. temperature, top_p, min_p: (S,) float32.
    top_k: (S,) int64, 0 is off. params: the same sampling state on the host, to see which work a
    batch needs at all.
    """

    length: torch.Tensor
    last_token: torch.Tensor
    pages: torch.Tensor
    seed: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    params: list[SamplingParams] = field(default_factory=list)

    @classmethod
    def allocate(cls, slots: int, pages: int, device: torch.device) -> Slots:
        def table(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            length=table(torch.int64, slots),
            last_token=table(torch.int64, slots),
            pages=table(torch.int32, slots, pages),
            seed=table(torch.int64, slots),
            temperature=table(torch.float32, slots),
            top_p=table(torch.float32, slots),
            top_k=table(torch.int64, slots),
            min_p=table(torch.float32, slots),
            params=[GREEDY] * slots,
        )

    def prepare(self, plan: StepPlan) -> None:
        """Bring the tables to where the plan starts: new tenants, new pages."""
        for admission in plan.admissions:
            self._admit(admission)
        for update in plan.page_updates:
            self._extend(update)
        for row in plan.rows:
            if row.tokens:  # the host knows where a prompt's chunk starts
                self.length[row.slot] = row.start

    def _admit(self, admission: Admission) -> None:
        slot, params = admission.slot, admission.params
        assert params.seed is not None, "seeds are drawn at arrival"
        self.params[slot] = params
        self.seed[slot] = params.seed
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.min_p[slot] = params.min_p

    def _extend(self, update: PageUpdate) -> None:
        last = update.first + len(update.pages)
        self.pages[update.slot, update.first : last] = torch.tensor(update.pages, dtype=torch.int32)

    def commit(self, slots: torch.Tensor, lengths: torch.Tensor, last_tokens: torch.Tensor) -> None:
        """Advance sequences: (R,) slots, their new lengths, the token that follows each."""
        self.length[slots] = lengths
        self.last_token[slots] = last_tokens
