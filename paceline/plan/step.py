"""The values that flow through a step: what shall be computed, and what came of it.

All frozen; made by the scheduler (`StepPlan`) or from the device's verdict (`StepResult`), consumed
by one step, dropped. Pure Python: no torch, no clock, no request objects.

    plan = StepPlan(rows=(Row, Row, ...), shape=DraftShape, ...)       depth 0 is plain decode
    tokens of a row: the given ones (a prompt's chunk), or the slot's last token, which only the
    device needs to know; then up to `drafts` draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cache.pool import Reservation
from paceline.plan.cost import AS_MEASURED, Pace
from paceline.plan.survival import UNKNOWN, Survival
from paceline.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """How much a step may speculate.

    depth: draft levels. branching: children kept per node and level. budget: draft tokens verified
    in the step over the whole batch. Depth 0 is plain decode.
    """

    depth: int = 0
    branching: int = 1
    budget: int = 0

    def __post_init__(self) -> None:
        assert self.depth >= 0 and self.branching >= 1 and self.budget >= 0, self
        assert (self.depth == 0) == (self.budget == 0), self


PLAIN = DraftShape()
PLENTY = 1 << 30  # draft tokens: more than anybody asks for
NOBODY = "nobody decodes"  # the reason for steps of prompts alone, whatever the policy
NO_ROOM = "no room beside the prompts"  # the reason for steps that are full without drafts
PROBE = "probe"  # the reason for steps that find out what drafts are worth
UNFREE = frozenset({NOBODY, NO_ROOM, PROBE})
"""Reasons for a depth that says nothing of how deep the policy would draft if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What each request may draft: levels, children kept per node, draft tokens verified.

    `over` a load it becomes the step's `DraftShape`.
    """

    depth: int
    branching: int = 1
    drafts: int

    @classmethod
    def chain(cls, depth: int) -> RequestShape:
        return cls(depth=depth, drafts=depth)

    def over(self, load: Load, reason: str) -> Choice:
        """This shape for every decoding row."""
        budget = self.drafts * load.decodes
        if not load.decodes:
            return Choice(shape=PLAIN, reason=NOBODY)
        shape = DraftShape(depth=self.depth, branching=self.branching, budget=budget)
        return Choice(shape=shape if budget else PLAIN, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a policy may look at when it chooses: counts of this step, no requests.

    running: requests that hold pages, those whose prompt is still being computed among them.
    rows: of this step. decodes: those of them that will sample from one known token.
    prefill_tokens: prompt tokens in the step. context_tokens: committed tokens of all rows.
    waiting: requests not admitted yet.
    survival: how likely drafts are to be accepted. pace: how fast the machine is at the moment.
    latest: the shape of the step before. plain_steps: steps since drafts were last verified.
    missed: what staying at that depth has cost since it was chosen, in steps (`Choice.missed`).
    room: draft tokens for which the step has room beside its rows, about.
    """

    running: int
    decodes: int
    prefill_tokens: int
    context_tokens: int
    waiting: int
    rows: int = 0
    survival: Survival = UNKNOWN
    pace: Pace = AS_MEASURED
    latest: DraftShape = PLAIN
    plain_steps: int = 0
    missed: float = 0.0
    room: int = PLENTY


NOTHING = Load(running=0, decodes=0, prefill_tokens=0, context_tokens=0, waiting=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A policy's answer with its reason, in words and, where it predicts, in numbers.

    widths: drafts that a row may propose, for each of the load's groups; none: the budget is spread
    evenly. floor: survival below which a draft is not verified. missed: what another depth would
    have gained over this one, as a share; below zero, what it would have lost. predicted_seconds,
    predicted_tokens: of the step, and what it will commit.

    A policy has few reasons, fixed with its settings: they label metrics. The load has the numbers.
    """

    shape: DraftShape
    reason: str
    widths: tuple[int, ...] = ()
    floor: float = 0.0
    missed: float = 0.0
    predicted_seconds: float | None = None
    predicted_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request's part of a step.

    slot, generation: where its device state lives, and for which tenant of the slot.
    start: tokens whose K/V is committed before the step; the row's first token has this position.
    tokens: given tokens (a chunk of the prompt); empty: the slot's last token.
    samples: a token is sampled after the row's last given token.
    drafts: draft tokens that the row may carry. lean: how much more than the average its drafts
    are likely to be accepted.
    """

    slot: int
    generation: int
    start: int
    tokens: tuple[int, ...] = ()
    samples: bool = True
    drafts: int = 0
    lean: float = 1.0

    @property
    def given(self) -> int:
        """Tokens of the row without drafts."""
        return len(self.tokens) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A slot got a new tenant: its sampling state and the text it comes with (for drafters).

    parent_page: page that holds the token before its first row, -1 at the beginning of a text.
    """

    slot: int
    params: SamplingParams
    tokens: tuple[int, ...] = ()
    parent_page: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUpdate:
    """Pages that a slot's page table gains in this step, from index `first` on."""

    slot: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, and the load that led to it. Rows come in no particular order."""

    rows: tuple[Row, ...]
    choice: Choice
    reservation: Reservation
    load: Load = NOTHING
    admissions: tuple[Admission, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()

    @property
    def shape(self) -> DraftShape:
        return self.choice.shape

    @property
    def given_tokens(self) -> int:
        return sum(row.given for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What a step did for one row: tokens committed after the given ones (none for a prompt's
    inner chunk), accepted drafts among them; the last committed token is always the bonus.

    levels: drafts verified at each level. walk: for each node on the way whose children were
    verified, (the drafter's confidence in each, which of them was right: 1 is the first, 0 none).
    proposed: the drafter's confidence in each draft that it made, verified or not.
    """

    tokens: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()
    walk: tuple[tuple[tuple[float, ...], int], ...] = ()
    proposed: tuple[float, ...] = ()

    @property
    def accepted(self) -> int:
        return max(len(self.tokens) - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of a plan, row by row, and how long it took (seconds)."""

    plan: StepPlan
    rows: tuple[RowResult, ...]
    seconds: float

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.plan.rows)
