"""How a run shows that it is alive: a bar on a terminal, else a plain line now and then.

Writes to one stream (stderr). Knows no HTTP; the caller says what happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PLAIN_EVERY_S = 10.0


class Display(Protocol):
    """Begin a phase, report its chunks and requests, end it; `tick` a few times a second."""

    def begin(self, label: str, total: int) -> None: ...
    def chunk(self) -> None: ...
    def request(self, failure: str | None) -> None: ...
    def tick(self) -> None: ...
    def end(self) -> None: ...
    def note(self, text: str) -> None: ...


def make_display(stream: TextIO) -> Display:
    """The display that suits `stream`."""
    return BarDisplay(stream) if stream.isatty() else PlainDisplay(stream)


class _Counts:
    """Requests and chunks of the current phase."""

    def __init__(self) -> None:
        self.label = ""
        self.total = self.done = self.failed = self.chunks = 0

    def begin(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.done = self.failed = self.chunks = 0

    def chunk(self) -> None:
        self.chunks += 1

    def request(self, failure: str | None) -> None:
        self.done += 1
        self.failed += failure is not None

    @property
    def text(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.done}/{self.total} requests{failed}, {self.chunks} chunks"


class PlainDisplay(_Counts):
    """A line every 10 s while a phase lasts, and one for each note."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._stream = stream
        self._clock = clock
        self._next = 0.0

    def begin(self, label: str, total: int) -> None:
        super().begin(label, total)
        self._next = self._clock() + PLAIN_EVERY_S

    def tick(self) -> None:
        if self._clock() >= self._next:
            self._next = self._clock() + PLAIN_EVERY_S
            self.note(f"{self.label}: {self.text}")

    def end(self) -> None:
        """Nothing to tidy up."""

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class BarDisplay(_Counts):
    """A bar that disappears when its phase ends. Drawn by `tick` alone: no thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._console = Console(file=stream)
        self._bar: Progress | None = None

    def begin(self, label: str, total: int) -> None:
        super().begin(label, total)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar.add_task(label, total=total, text=self.text)
        self._bar.start()

    def tick(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, text=self.text)
            self._bar.refresh()

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
