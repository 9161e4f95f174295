"""The adaptive choice is the best one by its own estimates, and says so."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.pool import PagePool
from paceline.plan.adaptive import SWITCH, Adaptive, tree_gains
from paceline.plan.cost import CostTable, Curve
from paceline.plan.step import (
    NO_ROOM,
    PLAIN,
    Choice,
    DraftShape,
    Load,
    RequestShape,
    Row,
    RowResult,
    StepPlan,
    StepResult,
)
from paceline.plan.survival import Classes, Survival
from paceline.sched.estimates import Estimates


def table(per_token: float, level: float) -> CostTable:
    return CostTable(
        tokens=Curve.through([(1, 0.01), (4, 0.011), (256, 0.011 + 252 * per_token)]),
        context=Curve.through([(1, 1e-8)]),
        level=Curve.through([(1, level), (64, 2 * level)]),
        proposal=level / 4,
    )


def load(
    groups: tuple[tuple[float, int], ...], rate: float, *, latest: DraftShape = PLAIN,
    prefill: int = 0, plain_steps: int = 0, offered: float = 1.0, missed: float = 0.0,
    spread: tuple[Classes, ...] = (),
) -> Load:  # fmt: skip
    rows = sum(count for _, count in groups)
    return Load(
        running=rows, decodes=rows, prefill_tokens=prefill, context_tokens=192 * rows, waiting=0,
        rows=rows, latest=latest, plain_steps=plain_steps, missed=missed,
        survival=Survival(
            rates=(rate,) * 8, ranks=(rate, rate / 4, rate / 8, rate / 16), offered=offered,
            groups=groups, spread=spread,
        ),
    )  # fmt: skip


def rate_of(policy: Adaptive, at: Load, widths: tuple[int, ...]) -> float:
    """Expected tokens a second if each group's rows carry chains of these widths: by hand."""
    survival = at.survival
    gain = drafts = 0.0
    nodes = [0] * 8
    for (lean, rows), width in zip(survival.groups, widths, strict=True):
        gain += rows * sum(survival.of(lean)[:width])
        drafts += rows * width
        for level in range(width):
            nodes[level] += rows
    given = at.decodes + at.prefill_tokens

    def step(tokens: float) -> float:
        return policy.costs.step(tokens, at.rows, at.context_tokens)

    mean = step(given + survival.offered * drafts)
    either = (1 - survival.offered) * step(given) + survival.offered * step(given + drafts)
    seconds = mean + (either - mean) / at.decodes if drafts else mean
    seconds += policy.costs.drafting([n for n in nodes if n])
    return (at.decodes + survival.offered * gain) / seconds


GROUPS = st.lists(
    st.tuples(st.sampled_from([0.3, 0.6, 1.0, 1.4]), st.integers(1, 40)),
    min_size=1, max_size=3, unique_by=lambda g: g[0],
).map(tuple)  # fmt: skip


@settings(deadline=None)
@given(
    groups=GROUPS, rate=st.floats(0, 1), per_token=st.floats(0, 0.002), level=st.floats(0, 0.003),
    prefill=st.integers(0, 100), offered=st.floats(0.05, 1),
)  # fmt: skip
def test_no_uniform_depth_is_better_and_plain_never_much(
    groups: tuple[tuple[float, int], ...], rate: float, per_token: float, level: float,
    prefill: int, offered: float,
) -> None:  # fmt: skip
    policy = Adaptive(table(per_token, level), RequestShape.chain(5), budget=10**6)
    at = load(groups, rate, prefill=prefill, offered=offered, missed=1.0)
    choice = policy.choose(at)
    assert choice.reason != "probe"
    widths = choice.widths or (0,) * len(groups)
    chosen = rate_of(policy, at, widths)
    assert choice.predicted_tokens is not None and choice.predicted_seconds is not None
    assert choice.predicted_tokens / choice.predicted_seconds == pytest.approx(chosen)
    plain = rate_of(policy, at, (0,) * len(groups))
    assert chosen >= plain * (1 - 1e-9)
    for depth in range(6):
        assert chosen >= rate_of(policy, at, (depth,) * len(groups)) * (1 - 1e-9)


def test_rows_that_are_more_likely_carry_more() -> None:
    policy = Adaptive(table(0.0002, 0.0002), RequestShape.chain(6), budget=10**6)
    choice = policy.choose(load(((1.4, 10), (0.3, 10)), 0.6))
    assert choice.widths[0] > choice.widths[1]
    assert choice.shape.depth == max(choice.widths)
    assert choice.shape.budget == 10 * sum(choice.widths)


def test_speculation_stops_where_tokens_cost_too_much() -> None:
    policy = Adaptive(table(0.0005, 0.0005), RequestShape.chain(5), budget=10**6)
    depths = [policy.choose(load(((1.0, rows),), 0.7)).shape.depth for rows in (1, 4, 16, 64, 200)]
    assert depths[0] > 1 and depths[-1] == 0
    assert depths == sorted(depths, reverse=True)


def test_a_weak_drafter_is_left_alone_but_for_probes() -> None:
    policy = Adaptive(table(0.0005, 0.0005), RequestShape.chain(5), budget=10**6)
    rows = ((1.0, 4),)
    choices = []
    plain_steps = 0
    for _ in range(2000):
        choice = policy.choose(load(rows, 0.01, plain_steps=plain_steps))
        plain_steps = 0 if choice.shape.budget else plain_steps + 1
        choices.append(choice)
    probes = [c for c in choices if c.reason == "probe"]
    assert probes and all(c.shape == DraftShape(depth=1, budget=1) for c in probes)
    plain = next(c for c in choices if c.reason != "probe")
    extra = sum(_seconds(c) - _seconds(plain) for c in probes)
    assert 0 < extra <= 0.006 * sum(map(_seconds, choices))


def _seconds(choice: Choice) -> float:
    assert choice.predicted_seconds is not None
    return choice.predicted_seconds


@settings(deadline=None)
@given(room=st.integers(0, 60), rows=st.integers(1, 20), branching=st.sampled_from([1, 3]))
def test_no_more_is_planned_than_there_is_room_for(room: int, rows: int, branching: int) -> None:
    most = RequestShape(depth=4, branching=branching, drafts=12 if branching > 1 else 4)
    policy = Adaptive(table(0.0, 0.0), most, budget=10**6)
    at = dataclasses.replace(load(((1.0, rows),), 0.9, missed=1.0), room=room)
    choice = policy.choose(at)
    assert choice.shape.budget <= room
    if not room:
        assert choice.reason == NO_ROOM and choice.predicted_tokens == rows
    elif room >= rows * most.drafts:
        assert choice.shape.budget > rows


def test_a_spread_that_contradicts_itself_is_survived() -> None:
    """Estimates of positions are made apart: a deeper draft may look likelier than the first."""
    spread = (((0.5, 0.4), (0.5, 0.01)), ((1.0, 0.7),), ((0.2, 0.9), (0.8, 0.0)))
    policy = Adaptive(table(0.0005, 0.0001), RequestShape.chain(3), budget=10**6)
    for rows in (1, 3, 40):
        choice = policy.choose(load(((1.3, rows), (0.4, 2)), 0.45, spread=spread, missed=1.0))
        assert choice.predicted_seconds is not None and 0 < choice.predicted_seconds < 1


def test_a_great_gain_is_taken_at_once_and_a_small_one_when_it_has_added_up() -> None:
    policy = Adaptive(table(0.0003, 0.0004), RequestShape.chain(5), budget=10**6)
    assert policy.choose(load(((1.0, 1),), 0.9)).shape.depth > 0  # from plain
    latest = DraftShape(depth=2, budget=16)

    def choose(missed: float) -> Choice:
        return policy.choose(load(((1.0, 8),), 0.5, latest=latest, missed=missed))

    best = choose(9.0)
    assert best.shape.depth != 2 and 0 < best.missed < SWITCH
    missed, steps = 0.0, 0
    while (choice := choose(missed)).shape.depth == 2:
        missed, steps = missed + choice.missed, steps + 1
        assert choice.reason == "kept: too little gain"
    assert choice.shape == best.shape and choice.reason in ("fastest", "drafts do not pay")
    assert steps == int(SWITCH / best.missed)


def test_unlikely_drafts_are_not_verified() -> None:
    """Half of the drafts are nearly certain, the others nearly hopeless: the floor lies between."""
    spread = tuple(((0.5, 0.9**level), (0.5, 0.02**level)) for level in (1, 2, 3))
    policy = Adaptive(table(0.0005, 0.0001), RequestShape.chain(3), budget=10**6)
    choice = policy.choose(load(((1.0, 10),), 0.45, spread=spread, missed=1.0))
    assert 0.02 < choice.floor < 0.9 and choice.shape.depth > 0
    assert choice.shape.budget < 10 * choice.shape.depth
    cheap = Adaptive(table(0.0, 0.0001), RequestShape.chain(3), budget=10**6)
    assert cheap.choose(load(((1.0, 10),), 0.45, spread=spread, missed=1.0)).floor < 0.02


def test_a_small_gain_does_not_change_the_depth() -> None:
    policy = Adaptive(table(0.0003, 0.0004), RequestShape.chain(5), budget=10**6)
    flips = 0
    latest = PLAIN
    for i in range(400):  # a rate that trembles around where the best depth changes
        choice = policy.choose(load(((1.0, 8),), 0.55 + 0.004 * (-1) ** i, latest=latest))
        flips += choice.shape.depth != latest.depth
        latest = choice.shape
    assert flips <= 1


def test_budget_and_branching_are_kept() -> None:
    policy = Adaptive(
        table(0.00001, 0.00001), RequestShape(depth=4, branching=4, drafts=16), budget=50
    )
    choice = policy.choose(load(((1.0, 3),), 0.6))
    assert choice.shape.branching == 4 and 16 * 3 <= 50
    assert choice.widths == (16,) and choice.shape.budget == 48
    for rows in (4, 9, 50, 60):
        assert policy.choose(load(((1.0, rows),), 0.6)).shape.budget <= 50


def test_nobody_decodes() -> None:
    policy = Adaptive(table(0.001, 0.001), RequestShape.chain(3), budget=10)
    assert policy.choose(load((), 0.6, prefill=50)).shape is PLAIN


@given(
    st.lists(st.floats(0.01, 0.3), min_size=1, max_size=4).map(
        lambda xs: tuple(sorted(xs, reverse=True))
    ),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_the_best_tree(ranks: tuple[float, ...], depth: int, most: int) -> None:
    gains = tree_gains(ranks, depth, most)
    paths = sorted(
        (
            _product(path)
            for length in range(1, depth + 1)
            for path in itertools.product(ranks, repeat=length)
        ),
        reverse=True,
    )
    assert len(gains) == min(most, len(paths))
    for size, gain in enumerate(gains, start=1):
        assert gain == pytest.approx(sum(paths[:size]))


def _product(path: tuple[float, ...]) -> float:
    out = 1.0
    for each in path:
        out *= each
    return out


def test_a_probe_is_no_change_of_depth() -> None:
    """What it finds decides, not that it was there."""
    policy = Adaptive(table(0.0005, 0.0005), RequestShape.chain(5), budget=10**6)
    estimates = Estimates()
    row = Row(slot=0, generation=1, start=50)
    drafted = 0
    for _ in range(600):
        leans = {i: estimates.acceptance.lean(str(i)) for i in range(4)}
        at = estimates.load([row] * 4, leans, running=4, waiting=0)
        choice = policy.choose(at)
        shares = estimates.shares(choice, at, leans)
        plan = StepPlan(
            rows=tuple(replace(row, drafts=shares[i]) for i in range(4)),
            choice=choice, load=at, reservation=PagePool(1, 1).reserve({}),
        )  # fmt: skip
        results = [RowResult(tokens=(1,))] * 4
        for i, share in shares.items():
            if share:  # every draft is wrong
                results[i] = RowResult(
                    tokens=(1,), levels=(1,) * share, walk=(((0.5,), 0),), proposed=(0.5,) * share
                )
                drafted += share
        result = StepResult(plan=plan, rows=tuple(results), seconds=0.012)
        estimates.learn(result, [str(i) for i in range(4)], policy)
    assert choice.reason in ("drafts do not pay", "probe")
    assert drafted < 150  # some at first, then a probe now and then
    assert estimates.acceptance.snapshot([]).rates[0] < 0.2
