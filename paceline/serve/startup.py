"""What a person sees while the server starts: one line a stage, or a moving line on a terminal.

Knows rich and stderr. Knows nothing of engines.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paceline.types import Progress as Stage


class StartupDisplay:
    """Shows each `Stage` on stderr until `close`."""

    def __init__(self) -> None:
        self._live = _LiveLine() if sys.stderr.isatty() else None
        self._stage = ""

    def show(self, stage: Stage) -> None:
        if self._live is not None:
            self._live.show(stage)
        elif stage.stage != self._stage:
            print(stage.stage, file=sys.stderr, flush=True)
        self._stage = stage.stage

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None


class _LiveLine:
    """A spinner, the stage, a bar where the total is known, the time so far; gone when closed."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def show(self, stage: Stage) -> None:
        self._progress.update(
            self._task,
            description=stage.stage,
            total=stage.total or None,
            completed=stage.done,
        )

    def close(self) -> None:
        self._progress.stop()
