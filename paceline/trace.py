"""Traces: every step's load, the policy's choice with its reason, and what came of it.

JSON lines. The first line says who wrote it and what the policy knew (`Header`), each further line
is a step (`Record`). `paceline replay` runs the loads through another policy, without a model.
Knows frozen values of `paceline.plan` only, no requests and no tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

import msgspec

import paceline
from paceline.errors import ConfigError
from paceline.plan.cost_file import CostFile
from paceline.plan.step import Choice, Load, RequestShape, StepResult

logger = logging.getLogger("paceline")

FORMAT = 1
FLUSH_SECONDS = 1.0  # a server that is killed leaves a file without its last second


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """paceline_trace: the format. most, costs: what an adaptive policy may do, and what it knew."""

    paceline_trace: int = FORMAT
    version: str = paceline.__version__
    policy: str
    most: RequestShape
    costs: CostFile


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One step. drafted: draft tokens verified. drafting: rows for which some were made.
    committed: tokens that rows gained. seconds: how long it really took.
    """

    load: Load
    choice: Choice
    drafted: int
    drafting: int
    committed: int
    seconds: float


class Trace(Protocol):
    """Whoever is told of every step."""

    def step(self, result: StepResult) -> None: ...

    def flush(self) -> None:
        """What was said so far can be read."""
        ...

    def close(self) -> None: ...


class NoTrace:
    def step(self, result: StepResult) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


NO_TRACE = NoTrace()


class TraceWriter:
    """Appends steps to a file. A write that fails ends the trace, with a warning, and nothing else.

    Raises ConfigError if the file cannot be made.
    """

    def __init__(self, path: str, header: Header) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] | None = create(path)
        self._flushed = time.monotonic()
        self._write(header)

    def step(self, result: StepResult) -> None:
        record = Record(
            load=result.plan.load,
            choice=result.plan.choice,
            drafted=sum(sum(row.levels) for row in result.rows),
            drafting=sum(row.proposed != () for row in result.rows),
            committed=sum(len(row.tokens) for row in result.rows),
            seconds=result.seconds,
        )
        self._write(record)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def _write(self, value: Header | Record) -> None:
        if self._file is not None:
            with self._or_end(self._file):
                self._file.write(self._encoder.encode(value) + b"\n")

    def flush(self) -> None:
        self._flushed = time.monotonic()
        if self._file is not None:
            with self._or_end(self._file):
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with self._or_end(self._file):
                self._file.close()
            self._file = None

    @contextmanager
    def _or_end(self, file: IO[bytes]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("the trace %s ends here: %s", self._path, error.strerror or error)
            self._file = None
            with suppress(OSError):  # what could not be written cannot be written now
                file.close()


def create(path: str) -> IO[bytes]:
    """An empty file. Raises ConfigError if it cannot be made."""
    try:
        return Path(path).open("wb")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror or error}") from None


# --- Reading -----------------------------------------------------------------------------------


def read_trace(path: str) -> tuple[Header, Iterator[Record]]:
    """The header, and the steps as they are read. A last line cut short is left out.

    Raises ConfigError for a file that is no trace, of another version, or broken (with its line).
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    try:
        found = msgspec.json.decode(lines[0], type=_Version)
    except msgspec.MsgspecError:
        raise ConfigError(f"{path} is no trace: write one with --trace FILE") from None
    if found.paceline_trace != FORMAT:
        raise ConfigError(
            f"{path} is a trace of format {found.paceline_trace}, this version of Paceline reads "
            f"{FORMAT}: replay it with version {found.version} that wrote it"
        )
    try:
        header = msgspec.json.decode(lines[0], type=Header)
        assert header.costs.table
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}, line 1: {error}") from None
    return header, _records(path, lines[1:])


class _Version(msgspec.Struct):
    paceline_trace: int
    version: str = "?"


def _records(path: str, lines: list[bytes]) -> Iterator[Record]:
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(lines, start=2):
        last = number == len(lines) + 1
        if last:  # complete lines end with a line break, so what follows the last one is torn
            return
        try:
            yield decoder.decode(line)
        except (AssertionError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
