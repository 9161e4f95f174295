"""Speculation policies: from the load of a step to its draft shape, with the reason. Pure.

A policy is asked once a step. It sees counts only and holds no state of requests; whatever it
answers, outputs stay the same, so a policy can only be slow, never wrong.
"""

from __future__ import annotations

from typing import Protocol

from paceline.plan.step import PLAIN, Choice, Load


class SpeculationPolicy(Protocol):
    """What the scheduler asks of a policy."""

    def choose(self, load: Load) -> Choice: ...


class Off:
    """Never speculates."""

    def choose(self, load: Load) -> Choice:
        return Choice(shape=PLAIN, reason="policy off")
