"""What the scheduler counts: steps, tokens, and how drafts fare by position and by shape.

Changed by `paceline.sched.scheduler` only, when a step is committed. Drafts past a request's end
count as nothing: neither as drafted nor as accepted. Pure Python, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.plan.step import PLAIN, Choice, RowResult, StepResult
from paceline.types import ShapeStats, SpeculationStats

MEMORY = 1000  # rows after which "recent" has forgotten about two thirds
SUSPECT_ATTEMPTS = 100  # rows with drafts before a drafter may be called suspect
SUSPECT_SHARE = 0.01  # of first drafts accepted, below which it is


@dataclass(slots=True)
class _Shape:
    steps: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the start; `attempts` and `accepted_at` by draft position."""

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    finished: int = 0
    attempts: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    _latest: Choice = field(default_factory=lambda: Choice(shape=PLAIN, reason=""))
    _recent: list[list[float]] = field(default_factory=list)  # attempts, accepted by position
    _shapes: dict[tuple[int, int, str], _Shape] = field(default_factory=dict)

    def step(self, result: StepResult) -> None:
        """A step is done; its rows follow, each by `row`."""
        self.steps += 1
        self.seconds += result.seconds
        self._latest = result.plan.choice
        self._shape().steps += 1

    def row(self, done: RowResult, taken: int, *, ended: bool) -> tuple[int, int]:
        """A row of that step committed its first `taken` tokens; `ended`: its request is over.

        Returns the drafts that count, and those of them accepted.
        """
        levels = done.levels[:taken] if ended else done.levels
        drafted, accepted = sum(levels), min(done.accepted, taken)
        self.committed += taken
        self.drafted += drafted
        self.accepted += accepted
        shape = self._shape()
        shape.committed += taken
        shape.drafted += drafted
        shape.accepted += accepted
        self._positions(len(levels), accepted)
        return drafted, accepted

    def _shape(self) -> _Shape:
        choice = self._latest
        key = (choice.shape.depth, choice.shape.branching, choice.reason)
        return self._shapes.setdefault(key, _Shape())

    def _positions(self, depth: int, accepted: int) -> None:
        while len(self.attempts) < depth:
            self.attempts.append(0)
            self.accepted_at.append(0)
            self._recent.append([0.0, 0.0])
        for position in range(depth):
            hit = accepted > position
            self.attempts[position] += 1
            self.accepted_at[position] += hit
            recent = self._recent[position]
            recent[0] += 1 - recent[0] / MEMORY
            recent[1] += hit - recent[1] / MEMORY

    @property
    def suspect(self) -> bool:
        """Many drafts, hardly one accepted: drafter and target do not seem to belong together."""
        if not self.attempts or self.attempts[0] < SUSPECT_ATTEMPTS:
            return False
        attempts, accepted = self._recent[0]
        return accepted < SUSPECT_SHARE * attempts

    def speculation(self) -> SpeculationStats:
        """Without what is not counted here: prediction and reliability."""
        shape = self._latest.shape
        return SpeculationStats(
            depth=shape.depth,
            branching=shape.branching,
            budget=shape.budget,
            reason=self._latest.reason,
            attempts=tuple(self.attempts),
            accepted=tuple(self.accepted_at),
            recent=tuple(accepted / attempts for attempts, accepted in self._recent),
            shapes=tuple(
                ShapeStats(
                    depth=depth,
                    branching=branching,
                    reason=reason,
                    steps=each.steps,
                    committed=each.committed,
                    drafted=each.drafted,
                    accepted=each.accepted,
                )
                for (depth, branching, reason), each in self._shapes.items()
            ),
            suspect=self.suspect,
        )
