"""What the scheduler learns of drafts and of the machine, step by step, for its policy to see.

One object owns the moving parts: acceptance by position and request, the machine's pace, how long
steps have been plain. `load` makes a frozen snapshot of them, `shares` turns a choice into drafts
by row, `learn` takes a step's outcome. Pure Python, no clock; of requests it knows ids only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.plan.acceptance import Acceptance
from paceline.plan.cost import PaceKeeper
from paceline.plan.policy import SpeculationPolicy
from paceline.plan.step import PLAIN, PLENTY, UNFREE, Choice, DraftShape, Load, Row, StepResult
from paceline.sched.prediction import PredictionErrors

SAMPLED = 4  # chains of a step whose confidence is looked at


class Estimates:
    """Everything that a policy may learn from."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.pace = PaceKeeper()
        self.prediction = PredictionErrors()
        self._pace = self.pace.snapshot()
        self._steps = 0
        self._latest: DraftShape = PLAIN
        self._plain_steps = 0
        self._missed = 0.0
        self._turn = 0

    def load(
        self, rows: Sequence[Row], drafting: Mapping[int, float], *, running: int, waiting: int,
        room: int = PLENTY,
    ) -> Load:  # fmt: skip
        """drafting: how the request of each slot whose row may draft leans (`Acceptance.lean`).
        room: draft tokens for which there is room."""
        decodes = sum(row.given == 1 and row.samples for row in rows)
        return Load(
            running=running,
            decodes=decodes,
            prefill_tokens=sum(row.given for row in rows) - decodes,
            context_tokens=sum(row.start for row in rows),
            waiting=waiting,
            rows=len(rows),
            survival=self.acceptance.snapshot(drafting.values()),
            pace=self._pace,
            latest=self._latest,
            plain_steps=self._plain_steps,
            missed=self._missed,
            room=room,
        )

    def shares(self, choice: Choice, load: Load, drafting: Mapping[int, float]) -> dict[int, int]:
        """Drafts that each slot's row may carry: by its group, or an even part of the budget.

        What an even spread leaves over goes to some rows, other ones each time.
        """
        if choice.widths:
            width = {
                lean: w for (lean, _), w in zip(load.survival.groups, choice.widths, strict=True)
            }
            return {slot: width[lean] for slot, lean in drafting.items()}
        each, over = divmod(choice.shape.budget, max(load.decodes, 1))
        self._turn += over
        slots = list(drafting)
        lucky = {slots[(self._turn + i) % len(slots)] for i in range(min(over, len(slots)))}
        return {slot: each + (slot in lucky) for slot in slots}

    def learn(
        self, result: StepResult, ids: Sequence[str | None], policy: SpeculationPolicy
    ) -> None:
        """ids: of each row's request, None if it has left. policy: says what it had expected."""
        plan = result.plan
        drafts = 0
        for row, done, request_id in zip(plan.rows, result.rows, ids, strict=True):
            drafts += sum(done.levels)
            if request_id is not None:
                self.acceptance.observe(request_id, row.drafts, done)
        self._spread(plan.shape, [done.proposed for done in result.rows if done.proposed])
        self.acceptance.fade()
        if plan.choice.reason not in UNFREE:
            self._gained(result)
            stays = plan.shape.depth == self._latest.depth
            self._missed = max(self._missed + plan.choice.missed, 0.0) if stays else 0.0
            self._latest = plan.shape
        self._plain_steps = 0 if drafts else self._plain_steps + 1
        expected = policy.seconds(plan, drafts, sum(done.proposed != () for done in result.rows))
        if expected is not None:
            tokens = sum(row.given for row in plan.rows) + drafts
            self.prediction.observe(expected, result.seconds)
            self.pace.observe(tokens, expected / plan.load.pace.factor(tokens), result.seconds)

        self._steps += 1
        if self._steps % self.acceptance.EVERY == 0:
            self._pace = self.pace.snapshot()

    def _gained(self, result: StepResult) -> None:
        """What drafts gained, where the policy had said what to expect."""
        plan, expected = result.plan, result.plan.choice.predicted_tokens
        if plan.shape.depth and expected is not None:
            gained = sum(done.accepted for done in result.rows)
            promised = (expected - plan.load.decodes) / plan.load.survival.kept
            self.acceptance.gained(gained, promised)

    def _spread(self, shape: DraftShape, proposed: Sequence[Sequence[float]]) -> None:
        """How sure the drafter is of its chains. A part of a large step tells it as well."""
        if shape.branching == 1:
            every = -(-len(proposed) // SAMPLED)
            for chain in proposed[self._plain_steps % (every or 1) :: every or 1]:
                self.acceptance.confidence.proposed(chain)

    def forget(self, request_id: str) -> None:
        self.acceptance.forget(request_id)
