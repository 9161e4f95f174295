"""Measures what steps and drafts cost on this machine, with the engine's own step. Seconds of work.

Runs before the first request: every page and slot is free, so the steps may write where they like;
nothing of it is ever read again. Results are kept on disk, one file for each model, drafter,
machine and version; a file that cannot be read is measured again with a warning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import torch

import paceline
from paceline.cache.pool import PagePool
from paceline.exec.batch import RaggedBatch
from paceline.exec.drafter import Drafter, Drafts, NoDrafter
from paceline.exec.drafters import Resolved
from paceline.exec.executor import Executor
from paceline.exec.slots import Slots
from paceline.model.accept import Verdict
from paceline.plan.cost import ROUGH, CostTable, Curve
from paceline.plan.step import Admission, Choice, DraftShape, PageUpdate, Row, StepPlan
from paceline.types import Progress, SamplingParams

logger = logging.getLogger("paceline")

TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (1, 4, 16)
SHORT, LONG = 8, 520  # tokens of context
REPEATS = 4
GREEDY = SamplingParams(temperature=0.0, seed=0)
FORMAT = 2  # of the files on disk


class _Rehearsal(NoDrafter):
    """Drafts anything, keeps up what the real drafter keeps up."""

    name = "rehearsal"

    def __init__(self, real: Drafter) -> None:
        self.real = real
        self.boundaries, self.caches = real.boundaries, real.caches

    def propose(self, plan: StepPlan, slots: Slots) -> Drafts:
        return Drafts.chains([(1,) * row.drafts for row in plan.rows])

    def upkeep(self, batch: RaggedBatch, features: torch.Tensor, verdict: Verdict) -> None:
        self.real.upkeep(batch, features, verdict)


@dataclasses.dataclass
class Profiler:
    """Times steps of an executor that serves nobody yet."""

    executor: Executor
    resolved: Resolved

    def __post_init__(self) -> None:
        real = self.executor.drafter
        self._rehearsal = dataclasses.replace(self.executor, drafter=_Rehearsal(real))

    def measure(self, on_progress: Callable[[Progress], None]) -> CostTable:
        """The whole table; progress by stages."""
        sizes = [n for n in TOKENS if n <= self._most_tokens()]
        work: list[tuple[str, int, int, int]] = [("step", n, *self._spread(n)) for n in sizes]
        done: dict[tuple[str, int], float] = {}
        for number, (kind, tokens, rows, width) in enumerate(work):
            on_progress(Progress(stage="measuring steps", done=number, total=len(work)))
            done[kind, tokens] = self._step_seconds(rows, width, SHORT)
        on_progress(Progress(stage="measuring drafts"))
        level, proposal = self._drafting()
        return CostTable(
            tokens=Curve.through((tokens, seconds) for (_, tokens), seconds in done.items()),
            context=self._context(),
            level=level,
            proposal=proposal,
        )

    def _most_tokens(self) -> int:
        pages = self.resolved.pages // -(-(SHORT + 64) // self.resolved.page_size)
        return min(self.resolved.max_batched_tokens, 64 * min(self.resolved.max_running, pages))

    def _spread(self, tokens: int) -> tuple[int, int]:
        """(rows, tokens of a row), as many rows as there may be."""
        width = -(-tokens // self.resolved.max_running)
        return -(-tokens // width), width

    def _context(self) -> Curve:
        """Seconds that a token of context adds, by the tokens of its row."""
        long = min(LONG, self.resolved.max_model_len - max(WIDTHS) - 1)
        rows = min(4, self.resolved.max_running)
        rows = max(min(rows, self.resolved.pages * self.resolved.page_size // (long + 64)), 1)
        points = []
        for width in WIDTHS:
            if long <= 2 * SHORT or rows * width > self.resolved.max_batched_tokens:
                continue
            near = self._step_seconds(rows, width, SHORT)
            far = self._step_seconds(rows, width, long)
            points.append((width, max(far - near, 0.0) / (rows * (long - SHORT))))
        return Curve.through(points or [(1, 0.0)])

    def _drafting(self) -> tuple[Curve, float]:
        """(seconds of a level by its nodes, seconds of a proposal beside its levels)."""
        counts = [n for n in NODES if n <= self.resolved.max_running] or [1]
        some = counts[len(counts) // 2]
        once = {count: self._proposal_seconds(count, 1) for count in counts}
        level = max(self._proposal_seconds(some, 3) - once[some], 0.0) / 2
        proposal = max(min(once.values()) - level, 0.0) if level else min(once.values())
        points = [(count, max(seconds - proposal, 0.0)) for count, seconds in once.items()]
        return Curve.through(points), proposal

    # Steps that nobody asked for ------------------------------------------------------------------

    def _step_seconds(self, rows: int, width: int, context: int) -> float:
        plan = self._plan(rows, drafts=width - 1, context=context, depth=max(width - 1, 0))
        return self._timed(lambda: self._rehearsal.execute(plan))

    def _proposal_seconds(self, rows: int, depth: int) -> float:
        plan = self._plan(rows, drafts=depth, context=SHORT, depth=depth)
        self.executor.slots.prepare(plan)
        drafter = self.executor.drafter
        for admission in plan.admissions:
            drafter.admit(admission)

        def propose() -> None:
            with torch.inference_mode():
                drafter.propose(plan, self.executor.slots)

        return self._timed(propose)

    def _timed(self, run: Callable[[], object]) -> float:
        """The fastest of a few runs after one that warms up: of the machine undisturbed."""
        run()
        times = []
        for _ in range(REPEATS):
            self._synchronise()
            started = time.perf_counter()
            run()
            self._synchronise()
            times.append(time.perf_counter() - started)
        return min(times)

    def _synchronise(self) -> None:
        if self.resolved.device.type == "cuda":
            torch.cuda.synchronize()

    def _plan(self, rows: int, *, drafts: int, context: int, depth: int) -> StepPlan:
        """Rows after a context of zeros: pages that nobody has written may hold no numbers."""
        size, pages = self.resolved.page_size, self.resolved.pages
        each = -(-(context + 1 + drafts) // size)
        for cache in (*self.executor.caches, *self.executor.drafter.caches):
            cache[: min(rows * each, pages)].zero_()
        shape = DraftShape(depth=depth, budget=drafts * rows) if drafts else DraftShape()
        return StepPlan(
            rows=tuple(
                Row(slot=slot, generation=0, start=context, tokens=(1,), drafts=drafts)
                for slot in range(rows)
            ),
            choice=Choice(shape=shape, reason="profile"),
            reservation=PagePool(1, size).reserve({}),
            admissions=tuple(
                Admission(slot=slot, params=GREEDY, tokens=(1,) * (context + 1))
                for slot in range(rows)
            ),
            page_updates=tuple(
                PageUpdate(
                    slot=slot,
                    first=0,
                    pages=tuple((slot * each + i) % pages for i in range(each)),
                )
                for slot in range(rows)
            ),
        )


# --- On disk -----------------------------------------------------------------------------------


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    format: int
    tokens: tuple[tuple[float, float], ...]
    context: tuple[tuple[float, float], ...]
    level: tuple[tuple[float, float], ...]
    proposal: float


def measured_costs(
    executor: Executor,
    resolved: Resolved,
    *,
    mode: str,
    names: Iterable[str],
    on_progress: Callable[[Progress], None],
) -> CostTable:
    """The cost table of an executor that serves nobody yet.

    mode: "cached" takes it from disk if it is there, "fresh" measures and keeps it, "none" guesses.
    names: what tells this model and drafter from others.
    """
    if mode == "none":
        return ROUGH
    key = _key(executor, resolved, names)
    path = _directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if mode == "cached":
        stored = _read(path, key)
        if stored is not None:
            return stored
    table = Profiler(executor, resolved).measure(on_progress)
    _write(path, key, table)
    return table


def _key(executor: Executor, resolved: Resolved, names: Iterable[str]) -> str:
    machine = platform.processor() or platform.machine()
    if resolved.device.type == "cuda":
        machine = torch.cuda.get_device_name(resolved.device)
    parts = (
        paceline.__version__, torch.__version__, machine, os.cpu_count(), torch.get_num_threads(),
        executor.kernels.name, executor.drafter.name, executor.target.name, resolved, *names,
    )  # fmt: skip
    return " | ".join(map(str, parts))


def _directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "profile"


def _read(path: Path, key: str) -> CostTable | None:
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        if stored.key != key or stored.format != FORMAT:
            raise ValueError("it is another machine's or version's")
        return CostTable(
            tokens=Curve.through(stored.tokens),
            context=Curve.through(stored.context),
            level=Curve.through(stored.level),
            proposal=stored.proposal,
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AssertionError, msgspec.MsgspecError) as error:
        logger.warning("the stored profile %s is of no use (%s): measuring again", path, error)
        return None


def _write(path: Path, key: str, table: CostTable) -> None:
    def points(curve: Curve) -> tuple[tuple[float, float], ...]:
        return tuple(zip(curve.x, curve.y, strict=True))

    stored = _Stored(
        key=key,
        format=FORMAT,
        tokens=points(table.tokens),
        context=points(table.context),
        level=points(table.level),
        proposal=table.proposal,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(stored))
        temporary.replace(path)
    except OSError as error:
        logger.warning("the profile cannot be kept (%s): the next start measures again", error)
