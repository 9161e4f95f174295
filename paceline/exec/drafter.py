"""Drafters: who proposes tokens for a step to verify. The executor owns one; nobody else knows it.

A drafter hears of every slot's new tenant (`admit`) and of every step's outcome (`observe`), and
proposes at most `Row.drafts` tokens for a row. What it must keep of every token, whoever drafted or
not, it takes from the target's own pass (`upkeep`), so it can start at any step. What it proposes
can only make a step slow, never wrong: a draft counts only where it equals what the target samples.
So a drafter that fails is replaced by no drafts for that step.

To add one see docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.exec.ngram import NOTHING, SuffixIndex
from paceline.exec.slots import Slots
from paceline.plan.step import Admission, Row, RowResult, StepPlan

if TYPE_CHECKING:  # the batch is built from drafts
    from paceline.exec.batch import RaggedBatch
    from paceline.model.accept import Verdict


UNSURE = 0.5  # the confidence of a drafter that does not say


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of a plan's rows, in order: tokens, and for each the node it follows (0: the root,
    j: the j-th draft). Rows without drafts have empty tuples. confidence: how sure the drafter is
    of each, in [0, 1], given that those before it are right; on any scale, as long as more is
    surer; empty if it does not say. failed: rows that ought to have some drafts, but their numbers
    were broken."""

    tokens: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...], ...]
    confidence: tuple[tuple[float, ...], ...] = ()
    failed: int = 0

    @classmethod
    def none(cls, plan: StepPlan) -> Drafts:
        empty = ((),) * len(plan.rows)
        return cls(empty, empty, empty)

    @classmethod
    def chains(
        cls, tokens: Sequence[tuple[int, ...]], confidence: Sequence[tuple[float, ...]] = ()
    ) -> Drafts:
        parents = tuple(tuple(range(len(row))) for row in tokens)
        return cls(tuple(tokens), parents, tuple(confidence))

    def within(self, plan: StepPlan, vocab_size: int) -> Drafts:
        """Itself, with some confidence for each draft, if it keeps to the plan and the vocabulary.

        ValueError says where it does not.
        """
        confidence = self.confidence or tuple((UNSURE,) * len(row) for row in self.tokens)
        rows = zip(plan.rows, self.tokens, self.parents, confidence, strict=True)
        for row, tokens, parents, sure in rows:
            if len(tokens) > row.drafts or not len(tokens) == len(parents) == len(sure):
                raise ValueError(f"{len(tokens)} drafts for a row that may carry {row.drafts}")
            if not all(0 <= token < vocab_size for token in tokens):
                raise ValueError("a draft token outside the vocabulary")
            if not all(0 <= parent <= j for j, parent in enumerate(parents)):
                raise ValueError("a draft that follows a later one")
            if not all(0 <= each <= 1 for each in sure):
                raise ValueError("a confidence that is no share")
        return self if self.confidence else dataclasses.replace(self, confidence=confidence)

    def best(self, plan: StepPlan) -> Drafts:
        """Those to verify: likely enough to survive, and as many as the step may carry.

        Drafts compete across the whole batch, whoever owns them.
        """
        floor, budget = plan.choice.floor, plan.shape.budget
        if not floor and sum(map(len, self.tokens)) <= budget:
            return self
        survival = plan.load.survival
        rows = zip(plan.rows, self.confidence, self.parents, strict=True)
        ranked = sorted(
            (-alive, number, j)
            for number, (row, sure, parents) in enumerate(rows)
            for j, alive in enumerate(survival.paths(sure, parents, lean=row.lean))
            if alive >= floor
        )  # a child is never before its parent
        kept: list[list[int]] = [[] for _ in plan.rows]
        for _, number, j in ranked[:budget]:
            kept[number].append(j)
        return self._only([sorted(row) for row in kept])

    def _only(self, kept: Sequence[Sequence[int]]) -> Drafts:
        """These drafts of each row, ascending, no child without its parent."""
        numbers = [{0: 0} | {j + 1: i for i, j in enumerate(row, start=1)} for row in kept]
        return dataclasses.replace(
            self,
            tokens=tuple(
                tuple(row[j] for j in some) for row, some in zip(self.tokens, kept, strict=True)
            ),
            parents=tuple(
                tuple(number[row[j]] for j in some)
                for row, some, number in zip(self.parents, kept, numbers, strict=True)
            ),
            confidence=tuple(
                tuple(row[j] for j in some) for row, some in zip(self.confidence, kept, strict=True)
            ),
        )


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


def walked(
    parents: Sequence[int], confidence: Sequence[float], path: Sequence[int]
) -> tuple[tuple[tuple[float, ...], int], ...]:
    """(confidence in each child, number of the accepted one or 0) of each node on an accepted path
    that has children.

    path: the accepted nodes after the root. Children come best first.
    """
    found = []
    for node, following in zip((0, *path), (*path, 0), strict=True):
        children = [j for j, parent in enumerate(parents, start=1) if parent == node]
        if children:
            rank = children.index(following) + 1 if following else 0
            found.append((tuple(confidence[j - 1] for j in children), rank))
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
        found = [
            self._index[row.slot].continuation(row.drafts) if row.drafts else NOTHING
            for row in plan.rows
        ]
        return Drafts.chains(
            [each.tokens for each in found],
            [
                tuple(_confidence(each.matched + i) for i in range(len(each.tokens)))
                for each in found
            ],
        )

    def observe(self, row: Row, result: RowResult) -> None:
        self._index[row.slot].extend(result.tokens)


def _confidence(matched: int) -> float:
    """In a token that follows where the same `matched` tokens stood before: more is surer."""
    return 1 - 2 / (matched + 1)
