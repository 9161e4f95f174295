"""How far predicted step times are from real ones. Pure Python, no clock."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from paceline.types import ERROR_BOUNDS, PredictionStats

MEMORY = 1000  # steps after which "recent" has forgotten about two thirds


@dataclass(slots=True)
class PredictionErrors:
    """Counts steps by their error; `recent` is the same with older steps weighing less."""

    steps: int = 0
    predicted: float = 0.0
    real: float = 0.0
    error_sum: float = 0.0
    _errors: list[int] = field(default_factory=lambda: [0] * (len(ERROR_BOUNDS) + 1))
    _recent: list[float] = field(default_factory=lambda: [0.0] * (len(ERROR_BOUNDS) + 1))
    _weight: float = 1.0  # of the next step in `_recent`: grows, instead of all others fading

    def observe(self, predicted: float, real: float) -> None:
        """One step, in seconds."""
        self.steps += 1
        self.predicted += predicted
        self.real += real
        error = abs(real / predicted - 1)
        self.error_sum += error
        bucket = bisect_left(ERROR_BOUNDS, error)
        self._errors[bucket] += 1
        self._recent[bucket] += self._weight
        self._weight *= 1 + 1 / MEMORY
        if self._weight > 1e9:
            self._recent = [count / self._weight for count in self._recent]
            self._weight = 1.0

    def stats(self) -> PredictionStats:
        return PredictionStats(
            steps=self.steps,
            predicted_seconds=self.predicted,
            real_seconds=self.real,
            errors=tuple(self._errors),
            error_sum=self.error_sum,
            median=self._quantile(0.5),
            p90=self._quantile(0.9),
        )

    def _quantile(self, share: float) -> float | None:
        """Linear within its bucket; beyond the last bound that bound."""
        wanted = share * sum(self._recent)
        if not wanted:
            return None
        below = 0.0
        for low, high, count in zip((0.0, *ERROR_BOUNDS), ERROR_BOUNDS, self._recent, strict=False):
            if below + count >= wanted:
                return low + (high - low) * (wanted - below) / count
            below += count
        return ERROR_BOUNDS[-1]
