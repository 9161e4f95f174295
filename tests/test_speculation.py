"""Speculation changes nothing: whatever the drafter, the shape, the load, the memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.engine import Engine
from paceline.exec.drafter import Drafter, Drafts, NgramDrafter, NoDrafter
from paceline.exec.slots import Slots
from paceline.model.llama import LlamaModel
from paceline.plan.adaptive import Adaptive
from paceline.plan.cost import ROUGH
from paceline.plan.policy import Schedule, SpeculationPolicy, Static, Threshold, WithoutCosts
from paceline.plan.step import (
    PLAIN,
    Admission,
    Choice,
    DraftShape,
    Load,
    RequestShape,
    Row,
    RowResult,
    StepPlan,
)  # fmt: skip
from paceline.types import AddRequest, SamplingParams
from tests.test_engine import alone, make_engine, model, requests, run

__all__ = ["alone", "model"]  # fixtures

Texts = dict[str, tuple[list[int], str]]


@dataclass
class TextDrafter(NoDrafter):
    """Remembers each slot's text, and drafts with `guess(text, count, rng)` -> tokens, parents."""

    guess: Callable[..., tuple[tuple[int, ...], tuple[int, ...]]]
    name: str = "test"
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    text: dict[int, list[int]] = field(default_factory=dict)

    def admit(self, admission: Admission) -> None:
        self.text[admission.slot] = list(admission.tokens)

    def propose(self, plan: StepPlan, slots: Slots) -> Drafts:
        guesses = [
            self.guess(self.text[row.slot], row.drafts, self.rng) if row.drafts else ((), ())
            for row in plan.rows
        ]
        return Drafts(tuple(t for t, _ in guesses), tuple(p for _, p in guesses))

    def observe(self, row: Row, result: RowResult) -> None:
        self.text[row.slot] += result.tokens


def garbage(_text: list[int], count: int, rng: random.Random):  # type: ignore[no-untyped-def]
    """Random tokens in a random tree."""
    tokens = tuple(rng.randrange(300) for _ in range(count))
    return tokens, tuple(rng.randrange(j + 1) for j in range(count))


def oracle(texts: Texts) -> Callable[..., tuple[tuple[int, ...], tuple[int, ...]]]:
    """The right tokens along a random path of a tree whose other nodes are wrong."""
    whole = {m.id: (*m.prompt, *texts[m.id][0]) for m in requests(16)}

    def guess(text: list[int], count: int, rng: random.Random):  # type: ignore[no-untyped-def]
        at = len(text)
        match = [w for w in whole.values() if len(w) > at and list(w[:at]) == text]
        coming = list(match[0][at:]) if match else []
        tokens: list[int] = []
        parents: list[int] = []
        spine = 0  # the node up to which all is right
        for j in range(count):
            if coming and rng.random() < 0.6:
                tokens.append(coming.pop(0))
                parents.append(spine)
                spine = j + 1
            else:
                tokens.append(rng.randrange(300))
                parents.append(rng.randrange(j + 1))
        return tuple(tokens), tuple(parents)

    return guess


@dataclass
class RandomPolicy(WithoutCosts):
    """Another shape each step, plain ones among them."""

    seed: int
    most: int = 12
    shapes: list[DraftShape] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def choose(self, load: Load) -> Choice:
        budget = self.rng.choice((0, 1, 3, self.most)) * load.decodes
        shape = DraftShape(depth=8, branching=8, budget=budget) if budget else PLAIN
        self.shapes.append(shape)
        return Choice(shape=shape, reason="random")


SETTINGS = [
    {},
    {"batched": 80, "page_size": 1},
    {"running": 3, "batched": 9, "page_size": 7},
    {"running": 16, "batched": 200, "pages": 34},
    {"running": 16, "batched": 300, "reference": True},
]


@pytest.mark.parametrize("kind", ["garbage", "oracle", "ngram"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_texts_are_those_without_speculation(
    model: LlamaModel, alone: Texts, kind: str, setting: dict[str, int]
) -> None:
    drafters: dict[str, Drafter] = {
        "garbage": TextDrafter(garbage),
        "oracle": TextDrafter(oracle(alone)),
        "ngram": NgramDrafter(),
    }
    for seed in range(2):
        engine = make_engine(model, drafter=drafters[kind], policy=RandomPolicy(seed), **setting)
        assert run(engine, requests(16)) == alone
        assert run(engine, requests(16)) == alone
        stats = engine.stats
        assert stats.drafter_failures_total == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        if kind != "ngram":
            assert stats.drafted_tokens_total > 100
        if kind == "oracle":
            assert stats.accepted_tokens_total > 50
            assert stats.steps_total < stats.committed_tokens_total


LOADS = {
    "seed": st.integers(0, 10**6),
    "running": st.integers(1, 16),
    "extra": st.integers(0, 60),
    "pages": st.integers(100, 300),
    "page_size": st.integers(1, 9),
    "order": st.permutations(range(16)),
    "aborted": st.sets(st.integers(0, 15), max_size=4),
}
"""Any load on any memory: what `random_load` and its engine take."""


def random_load(
    engine: Engine, alone: Texts, *, seed: int, order: list[int], aborted: set[int]
) -> None:
    """Requests come and are aborted at random; those that end do so as if alone, none is lost."""
    rng = random.Random(seed)
    waiting = [requests(16)[i] for i in order]
    got: dict[str, list[int]] = {m.id: [] for m in waiting}
    done: Texts = {}
    gone: set[str] = set()
    while waiting or not engine.idle:
        for _ in range(rng.randrange(3)):
            if waiting:
                message = waiting.pop()
                if engine.add(message) is not None:
                    gone.add(message.id)
        if rng.random() < 0.1 and aborted:
            name = str(aborted.pop())
            gone.add(name)
            engine.abort((name,))
        for delta in engine.step():
            got[delta.id] += delta.tokens
            if delta.finish is not None:
                done[delta.id] = (got[delta.id], str(delta.finish))
    for name, result in done.items():
        limit = engine.resolved.max_model_len - len(requests(16)[int(name)].prompt)
        if len(alone[name][0]) <= limit:
            assert result == alone[name]
    assert done.keys() | gone >= {str(i) for i in range(16)}
    stats = engine.stats
    assert stats.drafter_failures_total == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(**LOADS)
def test_any_load_any_memory_any_shapes(
    model: LlamaModel, alone: Texts, seed: int, running: int, extra: int, pages: int,
    page_size: int, order: list[int], aborted: set[int],
) -> None:  # fmt: skip
    engine = make_engine(
        model, drafter=TextDrafter(oracle(alone)), policy=RandomPolicy(seed, most=40),
        running=running, batched=running + extra, pages=pages, page_size=page_size,
    )  # fmt: skip
    random_load(engine, alone, seed=seed, order=order, aborted=aborted)


def broken(engine_kind: str) -> Drafter:
    def guess(text: list[int], count: int, rng: random.Random):  # type: ignore[no-untyped-def]
        if engine_kind == "raises":
            raise RuntimeError("boom")
        if engine_kind == "out of vocabulary":
            return (10**9,) * count, tuple(range(count))
        if engine_kind == "too many":
            return (1,) * (count + 1), tuple(range(count + 1))
        return (1,) * count, tuple(j + 1 for j in range(count))

    return TextDrafter(guess)


@pytest.mark.parametrize("kind", ["raises", "out of vocabulary", "too many", "follows itself"])
def test_a_drafter_that_fails_harms_no_request(
    model: LlamaModel, alone: Texts, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(model, drafter=broken(kind), policy=Static(RequestShape.chain(3)))
    assert run(engine, requests(16)) == alone
    asked = engine.stats.drafter_failures_total
    assert 3 < asked < engine.stats.steps_total / 2  # ever more seldom
    assert engine.stats.drafted_tokens_total == 0
    assert sum("drafter failed" in r.message for r in caplog.records) == 1


POLICIES: list[SpeculationPolicy] = [
    Threshold(RequestShape.chain(3), 2),
    Schedule.parse([[1, 2, 4], [3, 3, 1], [4, 9, 0]]),
    Adaptive(ROUGH, RequestShape.chain(6), budget=30),
]


@pytest.mark.parametrize("policy", POLICIES, ids=["threshold", "schedule", "adaptive"])
def test_switching_by_load_is_free(
    model: LlamaModel, alone: Texts, policy: SpeculationPolicy
) -> None:
    engine = make_engine(model, drafter=TextDrafter(oracle(alone)), policy=policy)
    for _ in range(3):
        assert run(engine, requests(1)) == {"0": alone["0"]}
        assert run(engine, requests(16)) == alone
    assert engine.stats.accepted_tokens_total > 0


def wrong(texts: Texts) -> Callable[..., tuple[tuple[int, ...], tuple[int, ...]]]:
    """Drafts that can never be accepted: children of the root that are not the next token."""
    whole = [(*m.prompt, *texts[m.id][0]) for m in requests(16)]

    def guess(text: list[int], count: int, _rng: random.Random):  # type: ignore[no-untyped-def]
        (token, *_) = (w[len(text)] for w in whole if list(w[: len(text)]) == text)
        return tuple((token + 1 + j) % 300 for j in range(count)), (0,) * count

    return guess


@pytest.mark.parametrize(
    "setting",
    [{"pages": 34, "running": 16, "batched": 60}, {"running": 5, "batched": 9, "page_size": 3}],
    ids=str,
)
def test_drafts_change_neither_who_runs_nor_who_waits(
    model: LlamaModel, alone: Texts, setting: dict[str, int]
) -> None:
    """Under pressure the same requests are admitted, preempted and found in the cache."""
    seen = []
    for policy in (Static(RequestShape.chain(0)), Static(RequestShape.chain(6))):
        engine = make_engine(model, drafter=TextDrafter(wrong(alone)), policy=policy, **setting)
        events = []
        for message in [*requests(16), *requests(16)]:
            if message.id in engine.scheduler.by_id:
                while not engine.idle:
                    engine.step()
            engine.add(message)
        while not engine.idle:
            engine.step()
            running = [r.id for r in engine.scheduler.running]
            events.append((running, engine.stats.preemptions_total))
        stats = engine.stats
        seen.append((events, stats.cached_prompt_tokens_total, stats.steps_total))
    assert seen[0] == seen[1]
    assert engine.stats.drafted_tokens_total > 100 and engine.stats.accepted_tokens_total == 0


@pytest.mark.parametrize("where", ["admit", "observe"])
def test_a_request_that_the_drafter_loses_is_lost_alone(
    model: LlamaModel, alone: Texts, where: str
) -> None:
    class Loses(TextDrafter):
        calls = 0

        def admit(self, admission: Admission) -> None:
            self._count("admit")
            super().admit(admission)

        def observe(self, row: Row, result: RowResult) -> None:
            self._count("observe")
            super().observe(row, result)

        def _count(self, what: str) -> None:
            self.calls += what == where
            if what == where and self.calls == 2:
                raise RuntimeError("lost")

    engine = make_engine(
        model, drafter=Loses(oracle(alone)), policy=Static(RequestShape.chain(3)), running=16,
        batched=200,
    )  # fmt: skip
    assert run(engine, requests(16)) == alone
    assert engine.stats.drafter_failures_total == 1
    assert engine.stats.accepted_tokens_total > 50


def test_drafts_are_dealt_out_fairly_and_as_far_as_they_fit(model: LlamaModel) -> None:
    """Too few tokens for all: even parts. Too few pages: what the own page still holds."""
    params = SamplingParams(max_tokens=100, temperature=0, seed=0, ignore_eos=True)
    engine = make_engine(
        model, drafter=TextDrafter(garbage), policy=Static(RequestShape.chain(40)), running=8,
        batched=64,
    )  # fmt: skip
    for i in range(8):
        engine.add(AddRequest(id=str(i), prompt=(i, 2, 3), params=params))
    engine.step()
    plan = engine.scheduler.plan_step()
    assert plan is not None
    assert [row.drafts for row in plan.rows] == [7] * 8  # (64 - 8) / 8
    engine.scheduler.fail(plan, "enough")
    engine = make_engine(
        model, drafter=TextDrafter(garbage), policy=Static(RequestShape.chain(40)), running=2,
        batched=128, pages=6, page_size=8,
    )  # fmt: skip
    for name in ("x", "y"):
        engine.add(AddRequest(id=name, prompt=(1, 2, 3) * 4, params=params))
    while not all(request.pending == 1 for request in engine.scheduler.running) or (
        len(engine.scheduler.running) < 2
    ):
        engine.step()
    plan = engine.scheduler.plan_step()
    assert plan is not None
    pages = engine.scheduler.pool
    ends = [row.start + 1 + row.drafts for row in plan.rows]
    assert all(row.drafts > 0 for row in plan.rows)
    assert sum(pages.pages_for(end) for end in ends) <= pages.pages
    assert any(end % 8 == 0 for end in ends)  # as far as the page goes


def test_nothing_is_kept_of_requests_that_have_left(model: LlamaModel, alone: Texts) -> None:
    engine = make_engine(
        model, drafter=TextDrafter(oracle(alone)), policy=Static(RequestShape.chain(3))
    )
    assert run(engine, requests(16)) == alone
    assert not engine.scheduler.estimates.acceptance._leans
    assert not engine.scheduler.by_id and engine.scheduler.slots.free == 8
