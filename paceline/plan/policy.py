"""Speculation policies: from the load of a step to its draft shape, with the reason. Pure.

A policy is asked once a step. It sees counts only and holds no state of requests; whatever it
answers, outputs stay the same, so a policy can only be slow, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from paceline.config import MAX_DEPTH, MAX_DRAFTS, EngineConfig
from paceline.errors import ConfigError
from paceline.plan.adaptive import Adaptive
from paceline.plan.cost import ROUGH, CostTable
from paceline.plan.objective import objective_of
from paceline.plan.step import PLAIN, Choice, Load, RequestShape, StepPlan


class SpeculationPolicy(Protocol):
    """What the scheduler asks of a policy."""

    def choose(self, load: Load) -> Choice: ...

    def seconds(self, plan: StepPlan, drafts: int, drafting: int) -> float | None:
        """What a step should have taken at its load's pace; None: no idea.

        drafts: tokens that were verified. drafting: rows for which some were made.
        """
        ...


class WithoutCosts:
    """A policy that knows no costs."""

    def seconds(self, plan: StepPlan, drafts: int, drafting: int) -> float | None:
        return None


@dataclass(frozen=True)
class Off(WithoutCosts):
    """Never speculates."""

    def choose(self, load: Load) -> Choice:
        return Choice(shape=PLAIN, reason="policy off")


@dataclass(frozen=True)
class Static(WithoutCosts):
    """The same shape at every load."""

    each: RequestShape

    def choose(self, load: Load) -> Choice:
        return self.each.over(load, "static")


@dataclass(frozen=True)
class Threshold(WithoutCosts):
    """A fixed shape up to `most` running requests, plain above."""

    each: RequestShape
    most: int

    def choose(self, load: Load) -> Choice:
        if load.running <= self.most:
            return self.each.over(load, f"at most {self.most} requests")
        return Choice(shape=PLAIN, reason=f"more than {self.most} requests")


@dataclass(frozen=True)
class Schedule(WithoutCosts):
    """A table of (first, last, shape) over the number of running requests; plain beyond it."""

    table: tuple[tuple[int, int, RequestShape], ...]

    @classmethod
    def parse(
        cls, rows: Sequence[Sequence[int]], *, branching: int = 1, depth: int = MAX_DEPTH
    ) -> Schedule:
        """From `[[1, 4, 5], [5, 16, 3], [17, 512, 0]]`: first, last, draft tokens of a request.

        branching, depth: of the trees; a chain is as deep as it has tokens. Raises ConfigError on
        gaps, overlaps, and more tokens than such a tree has.
        """
        most = min(branching + (depth - 1) * branching**2, MAX_DRAFTS)
        wanted = 1
        table = []
        for row in rows:
            if len(row) != 3 or not all(type(value) is int for value in row):
                raise ConfigError(f"schedule row {list(row)} must be [first, last, draft tokens]")
            first, last, drafts = row
            if first != wanted:
                kind = "overlaps the row before" if first < wanted else "leaves a gap"
                raise ConfigError(f"schedule row {list(row)} {kind}: it must begin at {wanted}")
            if last < first or drafts < 0:
                raise ConfigError(f"schedule row {list(row)} is empty or has negative drafts")
            if drafts > most:
                raise ConfigError(
                    f"schedule row {list(row)} has more than the {most} draft tokens of {depth} "
                    f"steps with topk {branching}: lower it, or raise --speculative-num-steps or "
                    "--speculative-eagle-topk"
                )
            shape = RequestShape(depth=min(depth, drafts), branching=branching, drafts=drafts)
            table.append((first, last, shape))
            wanted = last + 1
        if not table:
            raise ConfigError("the schedule is empty: give rows of [first, last, draft tokens]")
        return cls(tuple(table))

    def choose(self, load: Load) -> Choice:
        for first, last, shape in self.table:
            if first <= load.running <= last:
                return shape.over(load, f"{first} to {last} requests")
        return Choice(shape=PLAIN, reason="outside the schedule")


def shape_of(config: EngineConfig) -> RequestShape:
    """What a request may draft at most."""
    return RequestShape(
        depth=config.draft_depth, branching=config.draft_branching, drafts=config.draft_tokens
    )


def policy_of(
    config: EngineConfig, costs: Callable[[], CostTable] = lambda: ROUGH
) -> SpeculationPolicy:
    """The policy that the flags describe. costs: measured when a policy wants them.

    Raises ConfigError for a schedule or an objective that makes no sense.
    """
    objective, each = objective_of(config.objective), shape_of(config)
    match config.policy:
        case "off":
            return Off()
        case "static":
            return Static(each)
        case "threshold":
            most = config.speculative_disable_batch_threshold
            assert most is not None  # the configuration sees to it
            return Threshold(each, most)
        case "schedule":
            return _schedule(config)
        case "adaptive":
            budget = config.speculative_max_draft_tokens or 10**9
            return Adaptive(costs(), each, budget, objective)
    raise ConfigError(f"--speculative-policy {config.policy} has no policy behind it")


def _schedule(config: EngineConfig) -> Schedule:
    text, branching = config.speculative_schedule or "", config.draft_branching
    try:
        rows = msgspec.json.decode(text.encode(), type=list[list[int]])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--speculative-schedule is no list of rows: {error}") from None
    depth = MAX_DEPTH if branching == 1 else config.draft_depth
    return Schedule.parse(rows, branching=branching, depth=depth)
