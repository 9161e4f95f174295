"""What a comparison found: figures of every arm at every concurrency, and their regret. Pure.

regret of an arm at a level = 1 - its throughput / the best arm's, of medians over the rounds. An
arm with failed requests cannot be the best, nor can a repeated one (`plain#2`), whose difference
from the first is the noise.
"""

from __future__ import annotations

import io
import statistics
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

FORMAT = 1
KIND = "paceline compare"
_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm at one concurrency: throughput of each round in tokens a second; all requests."""

    throughput: tuple[float, ...] = ()
    requests: int = 0
    failed: int = 0

    @property
    def rate(self) -> float:
        """The median round; 0 where nothing succeeded."""
        return statistics.median(self.throughput) if self.throughput else 0.0

    def plus(self, throughput: float, requests: int, failed: int) -> Cell:
        return Cell((*self.throughput, throughput), self.requests + requests, self.failed + failed)


Grid = dict[str, dict[int, Cell]]
"""By arm, then by concurrency."""


def regrets(grid: Grid) -> dict[str, dict[int, float]]:
    """1 where nothing succeeded; an arm that is better than the best that counts: below zero."""
    found: dict[str, dict[int, float]] = {name: {} for name in grid}
    for level in next(iter(grid.values()), {}):
        able = [
            cells[level].rate
            for name, cells in grid.items()
            if "#" not in name and not cells[level].failed
        ]
        best = max(able, default=0.0)
        for name, cells in grid.items():
            rate = cells[level].rate
            found[name][level] = 1 - rate / best if best else float(rate == 0)
    return found


def noise(grid: Grid) -> float | None:
    """The largest difference between an arm and its repetition, as a share; None without one."""
    pairs = [(name, name.partition("#")[0]) for name in grid if "#" in name]
    apart = [
        abs(cell.rate / grid[first][level].rate - 1)
        for second, first in pairs
        for level, cell in grid[second].items()
        if grid[first][level].rate
    ]
    return max(apart, default=None)


def table(grid: Grid) -> str:
    """Throughput, failures and regret, as plain text."""
    lost = regrets(grid)
    levels = list(next(iter(grid.values()), {}))
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    drawn.add_column("arm", no_wrap=True)
    for level in levels:
        drawn.add_column(f"C={level}\ntok/s (regret)", justify="right", no_wrap=True)
    for heading in ("failed", "worst regret"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for name, cells in grid.items():
        failed = sum(cell.failed for cell in cells.values())
        total = sum(cell.requests for cell in cells.values())
        drawn.add_row(
            name,
            *(_cell(cells[level], lost[name][level]) for level in levels),
            f"{failed}/{total}",
            f"{max(lost[name].values(), default=0.0):.1%}",
        )
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None, force_terminal=False).print(drawn)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    apart = noise(grid)
    if apart is not None:
        lines += ["", f"noise: an arm and its repetition differ by up to {apart:.1%}"]
    return "\n".join(lines)


def _cell(cell: Cell, regret: float) -> str:
    failed = f", {cell.failed} failed" if cell.failed else ""
    return f"{cell.rate:.1f} ({regret:.1%}{failed})"


def document(grid: Grid, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON file's content. about: what was asked, of whom, when."""
    lost = regrets(grid)
    return {
        "benchmark": KIND,
        "format": FORMAT,
        **about,
        "noise": noise(grid),
        "worst_regret": {name: max(each.values(), default=0.0) for name, each in lost.items()},
        "failed": sum(cell.failed for cells in grid.values() for cell in cells.values()),
        "arms": {
            name: {
                str(level): {
                    "throughput_tok_s": cell.rate,
                    "rounds": list(cell.throughput),
                    "requests": cell.requests,
                    "failed": cell.failed,
                    "regret": lost[name][level],
                }
                for level, cell in cells.items()
            }
            for name, cells in grid.items()
        },
    }


def grid_of(found: dict[str, Any]) -> Grid:
    """Back from a JSON file's content. Raises ValueError, KeyError or TypeError for others."""
    if found.get("benchmark") != KIND:
        raise ValueError("it is no result of `paceline compare`")
    if found.get("format") != FORMAT:
        raise ValueError(f"its format is {found.get('format')}, this version reads {FORMAT}")
    return {
        name: {
            int(level): Cell(tuple(cell["rounds"]), cell["requests"], cell["failed"])
            for level, cell in cells.items()
        }
        for name, cells in found["arms"].items()
    }
