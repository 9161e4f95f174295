"""Policies against a cost table and acceptance rates: what they would do, and earn. Pure.

Every load is a closed loop at a steady state: so many requests decode, with so much context each,
no prompts. A chain's draft is accepted with the rate of its position whatever the request; a tree's
by the rank of the child.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.config import MAX_BRANCHING
from paceline.plan.cost import CostTable
from paceline.plan.forecast import Forecast, forecast
from paceline.plan.policy import SpeculationPolicy
from paceline.plan.step import Choice, DraftShape, Load
from paceline.plan.survival import DEPTH, Survival

STEPS = 1000  # after which an adaptive policy has surely settled
NEXT_CHILD = 0.6  # times the acceptance: share of what the children before miss that one catches


def child_rates(acceptance: float, count: int) -> tuple[float, ...]:
    """Probability that a node's i-th best child is the right one. acceptance: of the first.

    A further child catches a share of what those before it miss. That fits the demo model with
    disturbed drafts: first child 0.46 / 0.68 / 0.83, four children 0.79 / 0.96 / 1.00 measured,
    0.79 / 0.94 / 0.98 by this rule.
    """
    rates = [acceptance]
    for _ in range(count - 1):
        rates.append(min((1 - sum(rates)) * NEXT_CHILD * acceptance, rates[-1]))
    return tuple(rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """acceptance: of a draft whose predecessors were accepted. context: tokens of a request."""

    acceptance: float
    context: int
    concurrency: int

    @property
    def survival(self) -> Survival:
        return Survival(
            rates=(self.acceptance,) * DEPTH,
            ranks=child_rates(self.acceptance, MAX_BRANCHING),
            groups=((1.0, self.concurrency),),
        )

    @property
    def load(self) -> Load:
        count = self.concurrency
        return Load(
            running=count, decodes=count, rows=count, waiting=0, prefill_tokens=0,
            context_tokens=count * self.context, survival=self.survival,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an arm does in a setting. regret: 1 - its rate / the best arm's."""

    setting: Setting
    arm: str
    shape: DraftShape
    expected: Forecast
    regret: float


def simulate(
    costs: CostTable, arms: dict[str, SpeculationPolicy], settings: Sequence[Setting]
) -> Iterator[list[Outcome]]:
    """The outcomes of all arms, setting by setting."""
    for setting in settings:
        chosen = {name: settled(policy, setting.load) for name, policy in arms.items()}
        found = {name: forecast(costs, setting.load, choice) for name, choice in chosen.items()}
        best = max(each.rate for each in found.values())
        yield [
            Outcome(
                setting=setting,
                arm=name,
                shape=chosen[name].shape,
                expected=each,
                regret=1 - each.rate / best,
            )
            for name, each in found.items()
        ]


def settled(policy: SpeculationPolicy, load: Load) -> Choice:
    """What a policy chooses once nothing changes any more. Probes are left out."""
    choice = policy.choose(load)
    for _ in range(STEPS):
        stays = choice.shape.depth == load.latest.depth
        missed = max(load.missed + choice.missed, 0.0) if stays else 0.0
        load = replace(load, latest=choice.shape, missed=missed)
        following = policy.choose(load)
        if following.shape == choice.shape and following.missed <= 0:
            return following
        choice = following
    return choice
