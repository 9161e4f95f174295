"""Speculation policies: from the load of a step to its draft shape, with the reason. Pure.

A policy is asked once a step. It sees counts only and holds no state of requests; whatever it
answers, outputs stay the same, so a policy can only be slow, never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.plan.step import PLAIN, Choice, DraftShape, Load


class SpeculationPolicy(Protocol):
    """What the scheduler asks of a policy."""

    def choose(self, load: Load) -> Choice: ...


def chain(depth: int, load: Load) -> DraftShape:
    """A chain of `depth` drafts for every decoding row; plain where either is zero."""
    budget = depth * load.decodes
    return DraftShape(depth=depth, budget=budget) if budget else PLAIN


@dataclass(frozen=True)
class Off:
    """Never speculates."""

    def choose(self, load: Load) -> Choice:
        return Choice(shape=PLAIN, reason="policy off")


@dataclass(frozen=True)
class Static:
    """The same depth at every load."""

    depth: int

    def choose(self, load: Load) -> Choice:
        return Choice(shape=chain(self.depth, load), reason=f"static depth {self.depth}")


@dataclass(frozen=True)
class Threshold:
    """A fixed depth up to `most` decoding requests, plain above."""

    depth: int
    most: int

    def choose(self, load: Load) -> Choice:
        if load.decodes <= self.most:
            return Choice(
                shape=chain(self.depth, load), reason=f"{load.decodes} requests <= {self.most}"
            )
        return Choice(shape=PLAIN, reason=f"{load.decodes} requests > {self.most}")


@dataclass(frozen=True)
class Schedule:
    """A table of (first, last, depth) over the number of decoding requests; plain beyond it."""

    table: tuple[tuple[int, int, int], ...]

    @classmethod
    def parse(cls, rows: Sequence[Sequence[int]]) -> Schedule:
        """From `[[1, 4, 5], [5, 16, 3], [17, 512, 0]]`. Raises ConfigError on gaps or overlaps."""
        wanted = 1
        table = []
        for row in rows:
            if len(row) != 3 or not all(type(value) is int for value in row):
                raise ConfigError(f"schedule row {list(row)} must be [first, last, draft tokens]")
            first, last, depth = row
            if first != wanted:
                kind = "overlaps the row before" if first < wanted else "leaves a gap"
                raise ConfigError(f"schedule row {list(row)} {kind}: it must begin at {wanted}")
            if last < first or depth < 0:
                raise ConfigError(f"schedule row {list(row)} is empty or has negative drafts")
            table.append((first, last, depth))
            wanted = last + 1
        if not table:
            raise ConfigError("the schedule is empty: give rows of [first, last, draft tokens]")
        return cls(tuple(table))

    def choose(self, load: Load) -> Choice:
        for first, last, depth in self.table:
            if first <= load.decodes <= last:
                return Choice(
                    shape=chain(depth, load),
                    reason=f"{load.decodes} requests in {first}-{last}: {depth} drafts",
                )
        return Choice(shape=PLAIN, reason=f"{load.decodes} requests are outside the schedule")


def policy_of(config: EngineConfig) -> SpeculationPolicy:
    """The policy that the flags describe. Raises ConfigError for a schedule that makes no sense."""
    if config.speculative_algorithm == "NONE" or config.speculative_policy == "off":
        return Off()
    depth, most = config.speculative_num_steps, config.speculative_disable_batch_threshold
    if most is not None:
        return Threshold(depth, most)
    if config.speculative_schedule is not None:
        try:
            rows = msgspec.json.decode(config.speculative_schedule.encode(), type=list[list[int]])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--speculative-schedule is no list of rows: {error}") from None
        return Schedule.parse(rows)
    return Static(depth)
