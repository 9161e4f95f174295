"""`paceline simulate`: what policies would do and earn, from a table of a machine's step times.

No model and no GPU: expected tokens a second of each arm at each concurrency, what it chose, and
its regret against the best. The figures are as good as the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paceline.config import flag
from paceline.errors import ConfigError, PacelineError
from paceline.plan.arms import HELP, TREE_BRANCHING, policy_of_arm
from paceline.plan.cost_file import read_costs
from paceline.plan.simulation import Outcome, Setting, simulate
from paceline.plan.step import RequestShape

WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """What the user asked of the simulation."""

    costs: str = flag("h200-llama-3.1-8b", "cost table: a JSON file, or one that comes along")
    acceptance: tuple[float, ...] = flag(
        (0.3, 0.5, 0.7, 0.8), "acceptance of a draft whose predecessors were accepted"
    )
    context: tuple[int, ...] = flag((300, 4000), "tokens of context of a request")
    concurrency: tuple[int, ...] = flag(
        tuple(1 << i for i in range(11)), "requests that decode at the same time"
    )
    arms: str = flag("plain,static:3,static:5,tree:16,adaptive", f"policies to compare: {HELP}")
    depth: int = flag(5, "draft levels of adaptive at most")
    output: str | None = flag(None, "JSON file for the outcomes")

    def __post_init__(self) -> None:
        checks = (
            ("--acceptance", "0 to 1", self.acceptance, all(0 <= a <= 1 for a in self.acceptance)),
            ("--context", "0 or more", self.context, min(self.context) >= 0),
            ("--concurrency", "1 or more", self.concurrency, min(self.concurrency) >= 1),
            ("--depth", "1 to 8", self.depth, 1 <= self.depth <= 8),
        )
        for name, wanted, given, ok in checks:
            if not ok:
                raise ConfigError(f"{name} must be {wanted}, not {given}")


def run_simulation(config: SimulateConfig) -> int:
    """Print the tables and, last, one line of JSON. Returns the exit code."""
    costs = read_costs(config.costs)
    names = split_arms(config.arms)
    most = RequestShape(
        depth=config.depth, branching=_branching(names), drafts=_drafts(names, config.depth)
    )
    arms = {name: policy_of_arm(name, costs, most=most) for name in names}
    found: list[list[Outcome]] = []
    console = Console(file=sys.stdout, width=WIDTH, highlight=False)
    for acceptance in config.acceptance:
        for context in config.context:
            settings = [
                Setting(acceptance=acceptance, context=context, concurrency=concurrency)
                for concurrency in config.concurrency
            ]
            outcomes = list(simulate(costs, arms, settings))
            found += outcomes
            console.print(_table(f"acceptance {acceptance}, context {context}", outcomes))
    worst = {name: max(each.regret for row in found for each in row if each.arm == name)
             for name in arms}  # fmt: skip
    if config.output:
        _write(Path(config.output), config, found)
    print(json.dumps({"worst_regret": {name: round(regret, 4) for name, regret in worst.items()}}))
    return 0


def split_arms(text: str) -> list[str]:
    """Names between commas, but for those inside a schedule's brackets. Raises ConfigError."""
    names, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            names.append("")
        else:
            names[-1] += char
    names = [name.strip() for name in names]
    if len(set(names)) < len(names) or not all(names):
        raise ConfigError(f"--arms {text!r} has an empty name, or one twice")
    return names


def _branching(names: Sequence[str]) -> int:
    return TREE_BRANCHING if any(name.startswith("tree") for name in names) else 1


def _drafts(names: Sequence[str], depth: int) -> int:
    """Draft tokens of a request for adaptive: as many as the largest tree among the arms."""
    trees = [int(rest) for kind, _, rest in (n.partition(":") for n in names)
             if kind == "tree" and rest.isdigit()]  # fmt: skip
    return max([depth, *trees])


def _table(title: str, outcomes: Sequence[Sequence[Outcome]]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("requests", justify="right")
    for each in outcomes[0]:
        table.add_column(f"{each.arm}\ntok/s", justify="right")
    table.add_column("best", justify="left")
    chooses = [each.arm for each in outcomes[0] if each.arm == "adaptive"]
    for name in chooses:
        table.add_column(f"{name}\ndepth x budget", justify="right")
        table.add_column(f"{name}\nregret", justify="right")
    for row in outcomes:
        best = max(row, key=lambda each: each.expected.rate)
        cells = [str(row[0].setting.concurrency), *(f"{each.expected.rate:,.0f}" for each in row)]
        cells.append(best.arm)
        for each in row:
            if each.arm in chooses:
                tree = f" of {each.shape.branching}" if each.shape.branching > 1 else ""
                cells += [f"{each.shape.depth} x {each.shape.budget}{tree}", f"{each.regret:.1%}"]
        table.add_row(*cells)
    return table


def _write(path: Path, config: SimulateConfig, found: Sequence[Sequence[Outcome]]) -> None:
    rows = [
        {
            "acceptance": each.setting.acceptance,
            "context": each.setting.context,
            "concurrency": each.setting.concurrency,
            "arm": each.arm,
            "depth": each.shape.depth,
            "branching": each.shape.branching,
            "budget": each.shape.budget,
            "tokens_per_second": round(each.expected.rate, 2),
            "step_seconds": each.expected.seconds,
            "regret": round(each.regret, 5),
        }
        for row in found
        for each in row
    ]
    try:
        path.write_text(json.dumps({"costs": config.costs, "outcomes": rows}, indent=1) + "\n")
    except OSError as error:
        raise PacelineError(f"cannot write {path}: {error.strerror or error}") from None
