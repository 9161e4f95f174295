"""When requests are due. Pure: no clock, no HTTP."""

from __future__ import annotations

import random
from itertools import accumulate


def poisson_offsets(rate: float, count: int, *, seed: int) -> tuple[float, ...]:
    """Seconds from the start of a level at which each of `count` requests is due, ascending.

    The gaps, the one before the first request included, are independent and exponential with mean
    1 / `rate`: a Poisson process of `rate` requests a second. The same seed gives the same offsets,
    and a longer run begins with those of a shorter one.
    """
    assert rate > 0
    draw = random.Random(seed)
    return tuple(accumulate(draw.expovariate(rate) for _ in range(count)))
