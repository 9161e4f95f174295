"""A whole run: model name, warm-up, levels, result. `main` is what the command line calls.

Knows the order of things and where they are written; not how a request is sent or a figure defined.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from pathlib import Path

from paceline.bench.arrivals import poisson_offsets
from paceline.bench.client import Client, clock, find_model, open_session
from paceline.bench.config import BenchConfig
from paceline.bench.loops import closed_loop, open_loop
from paceline.bench.progress import Display, make_display
from paceline.bench.protocol import RequestFailed
from paceline.bench.record import RequestRecord
from paceline.bench.report import (
    BenchResult,
    LevelResult,
    document,
    failure_lines,
    level_line,
    summary,
    table,
)
from paceline.bench.workload import Prompt, choose_prompts, choose_warmup, load_prompts
from paceline.errors import ConfigError, PacelineError

API_KEY_VARIABLE = "PACELINE_API_KEY"
INTERRUPTED = 130

_TICK_S = 0.25
_UNKNOWN_MODEL = "default"


def main(config: BenchConfig) -> int:
    """Run, print, write the JSON file. The exit code: 0, 1 if a request failed, 130 on Ctrl-C.

    stdout gets a line for each level, with the reasons of failures below it, the table and, last,
    one line of JSON; progress and notes go to stderr. The file is rewritten after each level, so
    finished levels survive an interrupt. Raises ConfigError, and PacelineError if the file cannot
    be written.
    """
    if config.api_key is None and os.environ.get(API_KEY_VARIABLE):
        config = dataclasses.replace(config, api_key=os.environ[API_KEY_VARIABLE])
    prompts = load_prompts(config.prompts, config.api)
    started = datetime.now().astimezone()
    output = _output_path(config.output or f"results/bench-{started:%Y%m%d-%H%M%S}.json")

    finished = 0

    def level_done(result: BenchResult) -> None:
        nonlocal finished
        finished, level = len(result.levels), result.levels[-1]
        print("\n".join([level_line(level), *failure_lines(level)]), flush=True)
        _write(output, result)

    display = make_display(sys.stderr)
    try:
        result = asyncio.run(
            run(config, prompts, started=started, display=display, on_level=level_done)
        )
    except KeyboardInterrupt:
        display.note(_interrupted_line(finished, output))
        return INTERRUPTED
    _write(output, result)
    print(f"\n{table(result.levels)}\n\nresult: {output}")
    print(json.dumps(summary(result, str(output))), flush=True)
    return 1 if result.failed else 0


async def run(
    config: BenchConfig,
    prompts: Sequence[Prompt],
    *,
    started: datetime,
    display: Display,
    on_level: Callable[[BenchResult], None],
) -> BenchResult:
    """Warm up and measure each level. `on_level` gets the result so far after each of them.

    Every level has the same prompts in the same order. Failed requests are in the result; a server
    that cannot be reached makes a result with nothing but failures.
    """
    rejected: list[str] = []
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        display.note(text)

    def field_rejected(name: str) -> None:
        rejected.append(name)
        note(f"the server rejects {name}: going on without it")

    async with open_session(config) as session:
        try:
            model = config.model or await find_model(session, config)
        except RequestFailed as exc:
            model = _UNKNOWN_MODEL
            note(f"no model name from {config.api_base}/models ({exc}): sending {model!r}")
        client = Client(
            session, config, model=model, on_chunk=display.chunk, on_rejected=field_rejected
        )
        phase = _Phase(config=config, client=client, display=display)
        result = BenchResult(config=config, started=started.isoformat(timespec="seconds"),
                             model=model)  # fmt: skip
        if config.warmup:
            chosen = choose_warmup(prompts, config.warmup, seed=config.seed)
            warmup = await phase.warm_up(chosen)
            result = dataclasses.replace(result, warmup=warmup)
            display.note("\n".join([_warmup_line(warmup), *failure_lines(warmup)]))
        chosen = choose_prompts(prompts, config.requests_per_level, seed=config.seed)
        for concurrency in config.concurrency:
            level = await phase.measure(chosen, concurrency)
            result = dataclasses.replace(
                result,
                levels=(*result.levels, level),
                rejected=tuple(rejected),
                notes=tuple(notes),
            )
            on_level(result)
    for text in _remarks(result):
        note(text)
    return dataclasses.replace(result, notes=tuple(notes), complete=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Phase:
    """Runs one set of requests to its end and makes its figures."""

    config: BenchConfig
    client: Client
    display: Display

    async def warm_up(self, prompts: Sequence[Prompt]) -> LevelResult:
        """At the largest concurrency, so that the server meets the batch sizes to come."""
        concurrency = min(len(prompts), max(self.config.concurrency))
        async with self._shown("warm-up", len(prompts)):
            start = clock()
            records = await closed_loop(prompts, self._send, concurrency=concurrency, clock=clock)
        return self._result(records, concurrency, start=start)

    async def measure(self, prompts: Sequence[Prompt], concurrency: int) -> LevelResult:
        config = self.config
        async with self._shown(f"C={concurrency}", len(prompts)):
            start = clock()
            if config.rate is None:
                records = await closed_loop(
                    prompts, self._send, concurrency=concurrency, clock=clock
                )
            else:
                offsets = poisson_offsets(config.rate, len(prompts), seed=config.seed)
                records = await open_loop(
                    prompts, self._send, concurrency=concurrency, offsets=offsets, clock=clock
                )
        return self._result(records, concurrency, start=start)

    async def _send(self, index: int, prompt: Prompt, *, due: float) -> RequestRecord:
        record = await self.client.send(index, prompt, due=due)
        self.display.request(record.failure)
        return record

    def _result(
        self, records: Sequence[RequestRecord], concurrency: int, *, start: float
    ) -> LevelResult:
        return LevelResult.of(
            records, concurrency=concurrency, start=start, max_tokens=self.config.max_tokens
        )

    @contextlib.asynccontextmanager
    async def _shown(self, label: str, total: int) -> AsyncIterator[None]:
        self.display.begin(label, total)
        ticker = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticker.cancel()
            self.display.end()

    async def _tick(self) -> None:
        while True:
            self.display.tick()
            await asyncio.sleep(_TICK_S)


def _warmup_line(warmup: LevelResult) -> str:
    return f"warm-up: {warmup.ok}/{warmup.requests} ok in {warmup.wall:.1f} s"


def _interrupted_line(finished: int, output: Path) -> str:
    """What an interrupt leaves behind; an output file that was made but never written goes."""
    if finished:
        return f"interrupted: finished levels: {finished}, in {output}"
    if output.stat().st_size == 0:
        output.unlink()
    return "interrupted: no level was finished"


def _remarks(result: BenchResult) -> list[str]:
    """What a reader of the figures must know and would not see from them."""
    remarks = []
    short = sum(level.short for level in result.levels)
    if short:
        remarks.append(f"{short} requests ended before {result.config.max_tokens} tokens")
    if any(level.ok and level.token_count == "chunks" for level in result.levels):
        remarks.append("the server gave no usage: tokens are counted by chunks of the stream")
    return remarks


def _output_path(name: str) -> Path:
    """`name` as a path in a folder that exists. Raises ConfigError if it cannot be written."""
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as exc:
        raise ConfigError(f"--output {path}: {exc.strerror or exc}") from None
    return path


def _write(path: Path, result: BenchResult) -> None:
    try:
        path.write_text(json.dumps(document(result), indent=1) + "\n", encoding="utf-8")
    except OSError as exc:
        raise PacelineError(f"cannot write {path}: {exc.strerror or exc}") from None
