"""Drafters: who proposes tokens for a step to verify. The executor owns one; nobody else knows it.

A drafter hears of every slot's new tenant (`admit`) and of every step's outcome (`observe`), and
proposes at most `Row.drafts` tokens for a row. What it must keep of every token, whoever drafted or
not, it takes from the target's own pass (`upkeep`), so it can start at any step. What it proposes
can only make a step slow, never wrong: a draft counts only where it equals what the target samples.
So a drafter that fails is replaced by no drafts for that step.

To add one see docs/architecture.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.exec.ngram import SuffixIndex
from paceline.exec.slots import Slots
from paceline.plan.step import Admission, Row, RowResult, StepPlan

if TYPE_CHECKING:  # the batch is built from drafts
    from paceline.exec.batch import RaggedBatch
    from paceline.model.accept import Verdict


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of a plan's rows, in order: tokens, and for each the node it follows (0: the root,
    j: the j-th draft). Rows without drafts have empty tuples. failed: rows that ought to have some,
    but their numbers were broken."""

    tokens: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...], ...]
    failed: int = 0

    @classmethod
    def none(cls, plan: StepPlan) -> Drafts:
        empty = ((),) * len(plan.rows)
        return cls(empty, empty)

    @classmethod
    def chains(cls, tokens: list[tuple[int, ...]]) -> Drafts:
        return cls(tuple(tokens), tuple(tuple(range(len(row))) for row in tokens))

    def within(self, plan: StepPlan, vocab_size: int) -> Drafts:
        """Itself, if it keeps to the plan and the vocabulary; ValueError says where it does not."""
        for row, tokens, parents in zip(plan.rows, self.tokens, self.parents, strict=True):
            if len(tokens) > row.drafts or len(tokens) != len(parents):
                raise ValueError(f"{len(tokens)} drafts for a row that may carry {row.drafts}")
            if not all(0 <= token < vocab_size for token in tokens):
                raise ValueError("a draft token outside the vocabulary")
            if not all(0 <= parent <= j for j, parent in enumerate(parents)):
                raise ValueError("a draft that follows a later one")
        return self


def levels_of(parents: tuple[int, ...]) -> list[int]:
    """Level of each draft: 1 for a child of the root."""
    levels = [0]
    for parent in parents:
        levels.append(levels[parent] + 1)
    return levels[1:]


def counts_by_level(levels: list[int]) -> tuple[int, ...]:
    """Drafts at each level, from the first on."""
    counts = Counter(levels)
    return tuple(counts[level] for level in range(1, len(counts) + 1))


def walked(parents: tuple[int, ...], path: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(children, rank of the accepted one or 0) of each node on an accepted path that has children.

    path: the accepted nodes after the root. Children come best first.
    """
    found = []
    for node, following in zip((0, *path), (*path, 0), strict=True):
        children = [j for j, parent in enumerate(parents, start=1) if parent == node]
        if children:
            found.append((len(children), children.index(following) + 1 if following else 0))
    return tuple(found)


class Drafter(Protocol):
    """What the executor asks of a drafter. Its state is by slot; a new tenant replaces it."""

    @property
    def name(self) -> str: ...

    @property
    def advice(self) -> str:
        """What to do if hardly a draft is accepted, for people."""
        ...

    @property
    def boundaries(self) -> Sequence[int]:
        """Where `upkeep` wants the target's residual stream: b is before layer b."""
        ...

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        """K/V storage in the target's pages, to be moved with the target's."""
        ...

    def admit(self, admission: Admission) -> None:
        """A slot has a new tenant with this text: its prompt, after a preemption its output too."""
        ...

    def propose(self, plan: StepPlan, slots: Slots) -> Drafts:
        """Drafts for the rows that may carry some (`Row.drafts`), an entry for every row.

        The token before the first draft is the row's own, if it has one (`Row.tokens`), else
        `slots.last_token`. The shape's depth and branching are meant to be kept; the number of
        drafts must be.
        """
        ...

    def upkeep(self, batch: RaggedBatch, features: torch.Tensor, verdict: Verdict) -> None:
        """Keep what later drafts need of a step's tokens, drafts and given ones alike.

        features: (T, boundaries * target hidden). Nothing has been moved yet.
        """
        ...

    def observe(self, row: Row, result: RowResult) -> None:
        """What a row committed: generated tokens only, none for a prompt's inner chunk."""
        ...


class NoDrafter:
    """Proposes nothing and remembers nothing: what drafters without a network start from."""

    name = "no"
    advice = ""
    boundaries: Sequence[int] = ()
    caches: Sequence[torch.Tensor] = ()

    def admit(self, admission: Admission) -> None:
        pass

    def propose(self, plan: StepPlan, slots: Slots) -> Drafts:
        return Drafts.none(plan)

    def upkeep(self, batch: RaggedBatch, features: torch.Tensor, verdict: Verdict) -> None:
        pass

    def observe(self, row: Row, result: RowResult) -> None:
        pass


class NgramDrafter(NoDrafter):
    """Continues a request's text as it went on the last time its ending occurred."""

    name = "n-gram"
    advice = "these texts hardly repeat themselves; leave --speculative-algorithm out"

    def __init__(self) -> None:
        self._index: dict[int, SuffixIndex] = {}

    def admit(self, admission: Admission) -> None:
        self._index[admission.slot] = SuffixIndex(admission.tokens)

    def propose(self, plan: StepPlan, slots: Slots) -> Drafts:
        return Drafts.chains(
            [
                self._index[row.slot].continuation(row.drafts) if row.drafts else ()
                for row in plan.rows
            ]
        )

    def observe(self, row: Row, result: RowResult) -> None:
        self._index[row.slot].extend(result.tokens)
