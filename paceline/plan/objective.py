"""What the adaptive policy maximises, given what each request gains and how long the step takes.

    throughput       tokens a second over all requests
    latency          1 / the mean time that a request waits for a token
    goodput:MS       tokens a second of the requests that wait at most MS milliseconds for a token

Pure functions of numbers or arrays of them, one for each candidate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError

Array = NDArray[np.float64]


def _total(rows: Array, each: Array) -> Array:
    """Over all requests; each: (G, ...) of one of them."""
    return np.asarray((rows @ each.reshape(len(rows), -1)).reshape(each.shape[1:]))


class Objective(Protocol):
    """Higher scores are better; only their ratios count, as those of tokens a second."""

    def score(self, rows: Array, tokens: Array, seconds: Array) -> Array:
        """rows: (G,) requests of each group. tokens: (G, ...) that one of them is expected to get.

        seconds: (...) of the step.
        """
        ...


@dataclass(frozen=True)
class Throughput:
    def score(self, rows: Array, tokens: Array, seconds: Array) -> Array:
        return np.asarray(_total(rows, tokens) / seconds)


THROUGHPUT = Throughput()


@dataclass(frozen=True)
class Latency:
    def score(self, rows: Array, tokens: Array, seconds: Array) -> Array:
        waits = _total(rows, seconds / tokens) / rows.sum()
        return np.asarray(1 / waits)


@dataclass(frozen=True)
class Goodput:
    """seconds: the longest wait for a token that is good enough. Where none is, latency decides."""

    seconds: float

    def score(self, rows: Array, tokens: Array, seconds: Array) -> Array:
        speed = tokens / seconds
        good = _total(rows, speed * (speed * self.seconds >= 1))
        return np.asarray(good + 1e-6 * Latency().score(rows, tokens, seconds))


def objective_of(text: str) -> Objective:
    """From `throughput`, `latency` or `goodput:TPOT_MS`. Raises ConfigError."""
    kind, colon, number = text.partition(":")
    if text == "throughput":
        return THROUGHPUT
    if text == "latency":
        return Latency()
    if kind == "goodput" and colon:
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if math.isfinite(limit) and limit > 0:
            return Goodput(limit / 1000)
    raise ConfigError(
        f"--objective must be throughput, latency or goodput:MILLISECONDS of a token, not {text!r}"
    )
