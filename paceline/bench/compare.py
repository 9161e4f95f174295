"""`paceline compare`: several servers under the same load, in turn, and who loses how much where.

Every concurrency is measured in rounds, A B A B, so that a machine that slows down slows all.
Knows the order of things; servers are `paceline.bench.servers`', figures `comparison`'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from paceline.bench.comparison import Cell, Grid, document, table
from paceline.bench.config import BenchConfig, flag
from paceline.bench.envelope import draw
from paceline.bench.progress import make_display
from paceline.bench.run import INTERRUPTED, run
from paceline.bench.servers import Arm, arms_of, running
from paceline.bench.workload import Prompt, load_prompts
from paceline.errors import ConfigError, PacelineError


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What the user asked of the comparison. Raises ConfigError for values without sense."""

    arms: str = flag(
        "",
        "Paceline servers to start: plain, static:DEPTH, tree:TOKENS, threshold:REQUESTS:DEPTH, "
        "adaptive, between commas; one that is named twice shows the noise",
    )
    server: tuple[str, ...] = flag((), "servers that run already: NAME=URL, any OpenAI server")
    serve_flags: str = flag(
        "",
        "flags of every server that is started, in one text: a model, --speculative-algorithm ...",
    )
    concurrency: tuple[int, ...] = flag((1, 2, 4, 8, 16, 32), "requests in flight at the same time")
    rounds: int = flag(3, "rounds of all arms at each concurrency; medians count")
    requests_per_level: int = flag(
        0, "requests of a level (default: four for each that is in flight)"
    )
    max_tokens: int = flag(128, "tokens to generate for each request")
    prompts: str | None = flag(None, "file of prompts, as for bench (default: built-in prompts)")
    api: str = flag("chat", "endpoint that gets the requests", choices=("chat", "completions"))
    temperature: float = flag(0.0, "sampling temperature; 0 is greedy")
    timeout: float = flag(600.0, "seconds after which a request has failed")
    output: str = flag(
        "results/compare", "where the result goes: this name with .json, .png and .svg"
    )

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.requests_per_level < 0:
            raise ConfigError("--rounds must be at least 1, --requests-per-level not negative")
        self.bench("http://127.0.0.1", max(self.concurrency))

    def bench(self, url: str, concurrency: int, *, warmup: int = 0) -> BenchConfig:
        """The load of one arm at one concurrency in one round."""
        return BenchConfig(
            server_url=url, concurrency=(concurrency,), warmup=warmup, api=self.api,
            requests_per_level=self.requests_per_level or 4 * concurrency,
            max_tokens=self.max_tokens, prompts=self.prompts, temperature=self.temperature,
            timeout=self.timeout,
        )  # fmt: skip


def compare(config: CompareConfig) -> int:
    """Measure, print, draw. Returns 0; 1 if a request failed or a server was dead; 130 on Ctrl-C.

    Finished levels are kept whatever happens.
    """
    arms = arms_of(config.arms, config.server)
    common = shlex.split(config.serve_flags)
    prompts = load_prompts(config.prompts, config.api)
    stem = Path(config.output)
    stem.parent.mkdir(parents=True, exist_ok=True)
    started = datetime.now().astimezone()
    grid: Grid = {arm.name: {} for arm in arms}

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    code = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the children end with us
    try:
        with running(arms, common, say) as urls:
            measure(config, urls, prompts, grid=grid, say=say)
    except KeyboardInterrupt:
        say("interrupted")
        code = INTERRUPTED
    whole = {level for level in config.concurrency if all(level in row for row in grid.values())}
    grid = {name: {n: cell for n, cell in row.items() if n in whole} for name, row in grid.items()}
    if not whole:
        return code or 1
    found = document(grid, _about(config, arms, started))
    _write(stem, grid, found)
    print(f"{table(grid)}\n\nresult: {stem}.json, .png, .svg")
    brief = {key: found[key] for key in ("benchmark", "worst_regret", "noise", "failed")}
    print(json.dumps(brief), flush=True)
    return code or int(found["failed"] > 0)


def measure(
    config: CompareConfig,
    urls: dict[str, str],
    prompts: Sequence[Prompt],
    *,
    grid: Grid,
    say: Callable[[str], None],
) -> None:
    """Fills the grid, level by level, in rounds over all arms."""
    display = make_display(sys.stderr)
    fresh = set(urls)
    for level in config.concurrency:
        for turn in range(config.rounds):
            for name, url in urls.items():
                warmup = min(level, 4) if name in fresh else 0
                fresh.discard(name)
                result = asyncio.run(
                    run(
                        config.bench(url, level, warmup=warmup),
                        prompts,
                        started=datetime.now().astimezone(),
                        display=display,
                        on_level=lambda _: None,
                    )
                )
                (done,) = result.levels
                row = grid[name]
                known = row.get(level, Cell())
                row[level] = known.plus(done.throughput, done.requests, done.failed)
                failed = f", {done.failed} of {done.requests} failed" if done.failed else ""
                rate = f"{done.throughput:.1f} tok/s"
                say(f"C={level} round {turn + 1} {name}: {rate}{failed}")


def _about(config: CompareConfig, arms: Sequence[Arm], started: datetime) -> dict[str, object]:
    return {
        "version": version("paceline"),
        "started": started.isoformat(timespec="seconds"),
        "config": dataclasses.asdict(config),
        "servers": {arm.name: arm.url or list(arm.flags) for arm in arms},
    }


def _write(stem: Path, grid: Grid, found: dict[str, object]) -> None:
    try:
        stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        draw(grid, stem, "Throughput by concurrency, and what each arm loses to the best")
    except OSError as error:
        raise PacelineError(f"cannot write {stem}: {error.strerror or error}") from None
