"""Records to figures, and figures to a line, a table and JSON. Pure: no HTTP, no clock, no files.

Definitions, for one level:
- throughput: output tokens of the successful requests / wall time, in tokens a second. The wall
  time runs from the level's start to the end of its last request, failed ones included.
- per-req: the mean over successful requests of output tokens / latency.
- latency, TTFT (time to first token), inter-token latency, gap: see `RequestRecord`. Each is taken
  over the successful requests; gaps over all pairs of chunks that follow each other in one request.
- a percentile between two values is interpolated linearly: p99 of ten requests lies just below the
  slowest.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paceline.bench.config import BenchConfig
from paceline.bench.record import RequestRecord, TokenCount

_TABLE_WIDTH = 120
_MAX_REASONS = 5


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and percentiles of some values, in the values' unit."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None if there is no value (a None among the values is skipped)."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return None
        return cls(
            mean=math.fsum(known) / len(known),
            p50=percentile(known, 50),
            p99=percentile(known, 99),
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, at least one; linear between the two nearest."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, kw_only=True)
class LevelResult:
    """The figures of one level (or of the warm-up). Seconds and tokens; see the module's top.

    token_count: "usage" if the server counted the tokens of every successful request, else
    "chunks". failures: reasons with their counts, most frequent first. short: successful requests
    with fewer tokens than were asked for. start: when the level began, on the records' clock.
    """

    concurrency: int
    requests: int
    ok: int
    start: float
    wall: float
    output_tokens: int
    throughput: float
    per_request: float
    latency: Spread | None
    ttft: Spread | None
    itl: Spread | None
    gap: Spread | None
    wait: Spread | None
    prompt_tokens: int
    cached_tokens: int
    token_count: TokenCount
    short: int
    failures: tuple[tuple[str, int], ...]
    records: tuple[RequestRecord, ...]

    @classmethod
    def of(
        cls, records: Sequence[RequestRecord], *, concurrency: int, start: float, max_tokens: int
    ) -> LevelResult:
        good = [record for record in records if record.ok]
        wall = max((record.end for record in records), default=start) - start
        tokens = sum(record.output_tokens for record in good)
        speed = Spread.of(record.tokens_per_second for record in good)
        by_usage = all(record.token_count == "usage" for record in good)
        return cls(
            concurrency=concurrency,
            requests=len(records),
            ok=len(good),
            start=start,
            wall=wall,
            output_tokens=tokens,
            throughput=tokens / wall if wall > 0 else 0.0,
            per_request=speed.mean if speed else 0.0,
            latency=Spread.of(record.latency for record in good),
            ttft=Spread.of(record.ttft for record in good),
            itl=Spread.of(record.itl for record in good),
            gap=Spread.of(gap for record in good for gap in record.gaps),
            wait=Spread.of(record.wait for record in good),
            prompt_tokens=sum(record.prompt_tokens or 0 for record in good),
            cached_tokens=sum(record.cached_tokens or 0 for record in good),
            token_count="usage" if good and by_usage else "chunks",
            short=sum(record.output_tokens < max_tokens for record in good),
            failures=tuple(Counter(r.failure for r in records if r.failure).most_common()),
            records=tuple(records),
        )

    @property
    def failed(self) -> int:
        return self.requests - self.ok


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """A run so far. complete: all levels were measured. started: ISO 8601 with time zone.

    rejected: optional fields that the server refused and that were left out. notes: what a reader
    of the figures must know.
    """

    config: BenchConfig
    started: str
    model: str
    warmup: LevelResult | None = None
    levels: tuple[LevelResult, ...] = ()
    rejected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = False

    @property
    def failed(self) -> int:
        """Failed requests of the warm-up and of all levels."""
        return sum(level.failed for level in (self.warmup, *self.levels) if level is not None)


def level_line(level: LevelResult) -> str:
    """The level in one line; zeros where no request succeeded (`failure_lines` says why)."""
    latency = level.latency or Spread(mean=0.0, p50=0.0, p99=0.0)
    return (
        f"C={level.concurrency:>3} | {level.requests:>3} requests"
        f" | throughput: {level.throughput:>6.1f} tok/s"
        f" | per-req: {level.per_request:>6.1f} tok/s"
        f" | latency avg/p50/p99: {latency.mean:>4.1f}/{latency.p50:>4.1f}/{latency.p99:>4.1f}s"
        f" | ok: {level.ok}/{level.requests}"
    )


def failure_lines(level: LevelResult) -> list[str]:
    """One indented line for each reason, the five most frequent; empty if nothing failed."""
    lines = [f"       {count:>3} failed: {reason}" for reason, count in level.failures]
    if len(lines) > _MAX_REASONS:
        rest = sum(count for _, count in level.failures[_MAX_REASONS:])
        lines[_MAX_REASONS:] = [f"       {rest:>3} failed: for other reasons (see the JSON file)"]
    return lines


def table(levels: Sequence[LevelResult]) -> str:
    """All levels as a table of plain text, about 100 columns wide."""
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    names = (
        "C",
        "ok",
        "tok/s",
        "tok/s per req",
        "latency s",
        "TTFT ms",
        "inter-token ms",
        "gap ms",
    )
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for level in levels:
        succeeded = level.ok > 0
        grid.add_row(
            str(level.concurrency),
            f"{level.ok}/{level.requests}",
            f"{level.throughput:.1f}" if succeeded else "-",
            f"{level.per_request:.1f}" if succeeded else "-",
            _pair(level.latency, scale=1, digits=2),
            _pair(level.ttft, scale=1000, digits=0),
            _pair(level.itl, scale=1000, digits=1),
            _pair(level.gap, scale=1000, digits=1),
        )
    text = io.StringIO()
    console = Console(file=text, width=_TABLE_WIDTH, color_system=None, force_terminal=False)
    console.print(grid)
    rows = [line.rstrip() for line in text.getvalue().splitlines()]
    counted = sorted({level.token_count for level in levels if level.ok})
    about = "latency, TTFT, inter-token latency and gap between chunks: p50 / p99"
    return "\n".join(
        [*rows, "", about + (f"; tokens counted by {', '.join(counted)}" * bool(counted))]
    )


def _pair(spread: Spread | None, *, scale: float, digits: int) -> str:
    if spread is None:
        return "-"
    return f"{spread.p50 * scale:.{digits}f} / {spread.p99 * scale:.{digits}f}"


def summary(result: BenchResult, output: str) -> dict[str, Any]:
    """The run in one JSON object without its requests; `output` is the file that has them."""
    return {
        "benchmark": "paceline bench",
        "ok": result.complete and result.failed == 0,
        "failed": result.failed,
        "server_url": result.config.server_url,
        "model": result.model,
        "notes": list(result.notes),
        "warmup": _figures(result.warmup) if result.warmup else None,
        "levels": [_figures(level) for level in result.levels],
        "output": output,
    }


def document(result: BenchResult) -> dict[str, Any]:
    """The JSON file's content: everything but the API key; texts if the config asks for them."""
    config = asdict(result.config)
    del config["api_key"]
    texts = result.config.save_texts

    def full(level: LevelResult) -> dict[str, Any]:
        return _figures(level) | {"records": [_entry(r, level.start, texts=texts)
                                              for r in level.records]}  # fmt: skip

    return {
        "benchmark": "paceline bench",
        "format": 1,
        "started": result.started,
        "complete": result.complete,
        "ok": result.complete and result.failed == 0,
        "failed": result.failed,
        "model": result.model,
        "config": config,
        "rejected_fields": list(result.rejected),
        "notes": list(result.notes),
        "warmup": full(result.warmup) if result.warmup else None,
        "levels": [full(level) for level in result.levels],
    }


def _figures(level: LevelResult) -> dict[str, Any]:
    def spread(value: Spread | None) -> dict[str, float] | None:
        return None if value is None else {k: round(v, 6) for k, v in asdict(value).items()}

    return {
        "concurrency": level.concurrency,
        "requests": level.requests,
        "ok": level.ok,
        "failures": dict(level.failures),
        "wall_s": round(level.wall, 6),
        "output_tokens": level.output_tokens,
        "token_count": level.token_count,
        "short_outputs": level.short,
        "prompt_tokens": level.prompt_tokens,
        "cached_prompt_tokens": level.cached_tokens,
        "throughput_tok_s": round(level.throughput, 3) if level.ok else None,
        "per_request_tok_s": round(level.per_request, 3) if level.ok else None,
        "latency_s": spread(level.latency),
        "ttft_s": spread(level.ttft),
        "itl_s": spread(level.itl),
        "gap_s": spread(level.gap),
        "wait_s": spread(level.wait),
    }


def _entry(record: RequestRecord, start: float, *, texts: bool) -> dict[str, Any]:
    def seconds(value: float | None) -> float | None:
        return None if value is None else round(value, 6)

    entry = {
        "index": record.index,
        "prompt": record.prompt,
        "failure": record.failure,
        "finish_reason": record.finish_reason,
        "due_s": seconds(record.due - start),
        "wait_s": seconds(record.wait),
        "latency_s": seconds(record.latency),
        "ttft_s": seconds(record.ttft),
        "itl_s": seconds(record.itl),
        "output_tokens": record.output_tokens,
        "token_count": record.token_count,
        "chunks": record.chunks,
        "prompt_tokens": record.prompt_tokens,
        "cached_prompt_tokens": record.cached_tokens,
    }
    return entry | ({"text": record.text} if texts else {})
