"""`paceline replay`: the loads of a trace through another policy, without a model.

Open loop: the loads are those that the recorded policy led to. With more tokens a step another
policy would have met other ones, so the figures compare choices, not days.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paceline.config import flag
from paceline.errors import ConfigError
from paceline.plan.adaptive import run_seconds
from paceline.plan.arms import HELP, policy_of_arm
from paceline.plan.cost import CostTable
from paceline.plan.forecast import forecast
from paceline.plan.policy import SpeculationPolicy
from paceline.plan.step import UNFREE, Choice, Load
from paceline.trace import Record, read_trace

RECORDED = "recorded"
WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What the user asked of the replay."""

    trace: str = field(metadata={"positional": True, "help": "a file that --trace wrote"})
    policy: str = flag("adaptive", f"the policy that chooses instead: {HELP}")


@dataclass
class Tally:
    """What a policy did over the trace. tokens, seconds: as the cost model expects them."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    changes: int = 0
    depths: Counter[int] = field(default_factory=Counter)
    _depth: int = -1

    def add(self, costs: CostTable, load: Load, choice: Choice) -> None:
        expected = forecast(costs, load, choice)
        self.tokens += expected.tokens
        self.seconds += expected.seconds
        self.steps += 1
        self.depths[choice.shape.depth] += 1
        if choice.reason not in UNFREE:
            self.changes += self._depth not in (-1, choice.shape.depth)
            self._depth = choice.shape.depth

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Replayed:
    """A whole trace, under its own choices and another policy's. errors: of predicted times."""

    own: Tally = field(default_factory=Tally)
    other: Tally = field(default_factory=Tally)
    same: int = 0
    real_tokens: int = 0
    real_seconds: float = 0.0
    errors: list[float] = field(default_factory=list)
    differing: Counter[tuple[int, int, int]] = field(default_factory=Counter)


def run_replay(config: ReplayConfig) -> int:
    """Print the comparison and, last, one line of JSON. Returns the exit code."""
    header, records = read_trace(config.trace)
    costs = header.costs.table
    policy = policy_of_arm(config.policy, costs, most=header.most)
    found = replay(costs, policy, records)
    if not found.own.steps:
        raise ConfigError(f"{config.trace} has no step in it")
    names = (f"{RECORDED} ({header.policy})", config.policy)
    Console(file=sys.stdout, width=WIDTH, highlight=False).print(_table(names, found))
    print(_words(found))
    print(json.dumps(summary(config.policy, found)))
    return 0


def replay(costs: CostTable, policy: SpeculationPolicy, records: Iterable[Record]) -> Replayed:
    found = Replayed()
    for record in records:
        choice = policy.choose(record.load)
        found.own.add(costs, record.load, record.choice)
        found.other.add(costs, record.load, choice)
        found.same += choice == record.choice
        found.real_tokens += record.committed
        found.real_seconds += record.seconds
        expected = run_seconds(
            costs, record.load, record.choice.shape, drafts=record.drafted, drafting=record.drafting
        )
        found.errors.append(abs(record.seconds / expected - 1))
        if choice.shape.depth != record.choice.shape.depth:
            at = (record.load.decodes, record.choice.shape.depth, choice.shape.depth)
            found.differing[at] += 1
    return found


def summary(policy: str, found: Replayed) -> dict[str, object]:
    errors = sorted(found.errors)
    return {
        "policy": policy,
        "steps": found.own.steps,
        "same_choice": found.same,
        "real_tokens_per_second": _ratio(found.real_tokens, found.real_seconds),
        "expected_tokens_per_second": {RECORDED: found.own.rate, policy: found.other.rate},
        "depth_changes": {RECORDED: found.own.changes, policy: found.other.changes},
        "prediction_error": {
            "median": statistics.median(errors) if errors else None,
            "p90": errors[int(0.9 * (len(errors) - 1))] if errors else None,
        },
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _table(names: Sequence[str], found: Replayed) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("policy", "expected tok/s", "depth changes", "steps by depth"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name, tally in zip(names, (found.own, found.other), strict=True):
        depths = ", ".join(
            f"{depth}: {count / tally.steps:.0%}" for depth, count in sorted(tally.depths.items())
        )
        table.add_row(name, f"{tally.rate:,.1f}", str(tally.changes), depths)
    return table


def _words(found: Replayed) -> str:
    lines = [
        f"{found.own.steps} steps, {found.same} with the same choice; really "
        f"{_ratio(found.real_tokens, found.real_seconds):,.1f} tok/s.",
        "Expected figures are the cost model's, of both policies at the same recorded loads: "
        "another policy would have led to other loads.",
    ]
    for (decodes, own, other), count in found.differing.most_common(5):
        lines.append(f"at {decodes} decoding: depth {own} recorded, {other} now, in {count} steps")
    return "\n".join(lines)
