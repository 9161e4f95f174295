"""`paceline tune`: the schedule that measured figures imply, in the words of several engines.

From results of `paceline compare`: at each concurrency the draft tokens of the best fixed arm
(`plain` 0, `static:K` K); more drafts than the level above only where they win by more than the
noise. Levels are cut half way, in the geometric mean.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.comparison import Grid, grid_of, noise
from paceline.bench.config import flag
from paceline.errors import ConfigError

NOISE = 0.02  # where a result has no repeated arm
LAST = 512  # the schedule's last number of requests, or twice the highest level


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What the user asked. from_: `--from`."""

    from_: tuple[str, ...] = flag((), "JSON files that `paceline compare` wrote")

    def __post_init__(self) -> None:
        if not self.from_:
            raise ConfigError("tune needs --from FILE.json, as `paceline compare` writes it")


@dataclass(frozen=True, slots=True)
class Step:
    """Requests first to last draft so many tokens each."""

    first: int
    last: int
    drafts: int


def tune(config: TuneConfig) -> int:
    """Print the schedule in every form. Returns the exit code."""
    grids = [read(path) for path in config.from_]
    for path, grid in zip(config.from_, grids, strict=True):
        steps = schedule(grid)
        print(f"{path}: draft tokens of a request, by requests in flight")
        for step in steps:
            print(f"  {step.first:>4} to {step.last:<4} {step.drafts}")
        print()
        for engine, text in forms(steps).items():
            print(f"{engine}:\n  {text}\n")
    return 0


def read(path: str) -> Grid:
    """Raises ConfigError for what is no result of a comparison."""
    try:
        return grid_of(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def drafts_of(name: str) -> int | None:
    """Draft tokens of a fixed chain; None for arms that are none."""
    kind, _, rest = name.partition(":")
    if name == "plain":
        return 0
    return int(rest) if kind == "static" and rest.isdigit() else None


def schedule(grid: Grid) -> list[Step]:
    """From 1 on, without gaps. Raises ConfigError without a fixed arm that always succeeded."""
    named = ((drafts_of(name), cells) for name, cells in grid.items())
    fixed = {drafts: cells for drafts, cells in named if drafts is not None}
    if not fixed:
        raise ConfigError("there is no fixed arm in the result: compare plain and static:K arms")
    margin = noise(grid)
    margin = NOISE if margin is None else margin
    levels = sorted(next(iter(fixed.values())))
    best = [_best({d: cells[level].rate for d, cells in fixed.items() if not cells[level].failed},
                  margin) for level in levels]  # fmt: skip
    last = max(LAST, 2 * levels[-1])
    ends = [math.isqrt(a * b) if a < b else a for a, b in itertools.pairwise(levels)]
    steps: list[Step] = []
    first = 1
    for drafts, end in zip(best, [*ends, last], strict=True):
        if steps and steps[-1].drafts == drafts:
            steps[-1] = Step(steps[-1].first, end, drafts)
        else:
            steps.append(Step(first, end, drafts))
        first = end + 1
    return steps


def _best(rates: dict[int, float], margin: float) -> int:
    """The fewest drafts that are as fast as the fastest, but for the noise."""
    top = max(rates.values(), default=0.0)
    return min((d for d, rate in rates.items() if rate >= top * (1 - margin)), default=0)


def forms(steps: Sequence[Step]) -> dict[str, str]:
    """What to give to each engine, by its name.

    As of late 2026. vLLM takes [first, last, tokens] rows. SGLang picks the entry whose batch size
    is closest, so both ends of a step are named. TensorRT-LLM's keys are the largest batch size of
    each length (in older versions the smallest), and beyond the last it does not draft.
    """
    ours = [[step.first, step.last, step.drafts] for step in steps]
    most = max(step.drafts for step in steps)
    ends = {str(n): {"candidate_steps": [step.drafts]} for step in steps
            for n in (step.first, step.last)}  # fmt: skip
    return {
        "Paceline": f"--speculative-policy schedule --speculative-schedule '{json.dumps(ours)}'",
        "vLLM, in --speculative-config": json.dumps(
            {"num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": ours}
        ),
        "SGLang, the file of --speculative-adaptive-config": json.dumps(ends),
        "TensorRT-LLM, in the speculative config": json.dumps(
            {"max_draft_len": most,
             "draft_len_schedule": {str(step.last): step.drafts for step in steps}}
        ),
    }  # fmt: skip
