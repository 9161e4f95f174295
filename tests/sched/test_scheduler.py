"""The scheduler on a model that is bookkeeping only; every step is checked."""

from __future__ import annotations

import random
from collections import defaultdict

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.cache.pool import PagePool
from paceline.plan.policy import Off
from paceline.plan.step import StepPlan
from paceline.sched.scheduler import Limits, Scheduler
from paceline.types import AddRequest, Delta, FinishReason, SamplingParams
from tests.sched.fake import FakeExecutor, plain_text

EOS = 7
VOCAB = 11


def _scheduler(
    *, pages: int = 16, page_size: int = 2, running: int = 4, batched: int = 8, length: int = 24
) -> Scheduler:
    limits = Limits(
        max_running=running,
        max_batched_tokens=batched,
        max_model_len=min(length, pages * page_size),
        eos_token_ids=frozenset({EOS}),
    )
    return Scheduler(limits, PagePool(pages, page_size), Off())


def _request(
    name: str,
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    max_tokens: int = 5,
    seed: int = 0,
    ignore_eos: bool = False,
) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    return AddRequest(id=name, prompt=prompt, params=params)


def _drain(scheduler: Scheduler, executor: FakeExecutor) -> list[Delta]:
    deltas = []
    for _ in range(10_000):
        plan = scheduler.plan_step()
        if plan is None:
            break
        deltas += scheduler.commit(executor.execute(plan))
        scheduler.check()
    assert scheduler.idle
    return deltas


def _fake(scheduler: Scheduler) -> FakeExecutor:
    return FakeExecutor(
        slots=scheduler.limits.max_running, page_size=scheduler.pool.page_size, vocab=VOCAB
    )


def expected(message: AddRequest, max_model_len: int) -> tuple[tuple[int, ...], FinishReason]:
    """Tokens and finish reason of a request that runs alone."""
    assert message.params.max_tokens is not None and message.params.seed is not None
    count = min(message.params.max_tokens, max_model_len - len(message.prompt))
    text = plain_text(message.prompt, message.params.seed, vocab=VOCAB, count=count)
    if EOS in text and not message.params.ignore_eos:
        return text[: text.index(EOS) + 1], FinishReason.STOP
    return text, FinishReason.LENGTH


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, abort, step, fail, in any order and with little memory; text is as if alone."""

    @initialize(
        pages=st.integers(4, 24),
        page_size=st.integers(1, 4),
        running=st.integers(1, 5),
        extra=st.integers(0, 9),
    )
    def start(self, pages: int, page_size: int, running: int, extra: int) -> None:
        self.scheduler = _scheduler(
            pages=pages, page_size=page_size, running=running, batched=running + extra
        )
        self.executor = _fake(self.scheduler)
        self.open: dict[str, AddRequest] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        max_tokens=st.integers(1, 20),
        seed=st.integers(0, 2),
        ignore_eos=st.booleans(),
    )
    def submit(self, prompt: list[int], max_tokens: int, seed: int, ignore_eos: bool) -> None:
        self.count += 1
        message = AddRequest(
            id=str(self.count),
            prompt=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos),
        )
        refusal = self.scheduler.add(message)
        fits = len(prompt) < self.scheduler.limits.max_model_len
        assert (refusal is None) == fits
        if fits:
            self.open[message.id] = message

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        if self.open:
            name = sorted(self.open)[pick % len(self.open)]
            self.scheduler.abort((name, "unknown"))
            del self.open[name]

    @rule()
    def fail(self) -> None:
        plan = self.scheduler.plan_step()
        if plan is None:
            return
        for delta in self.scheduler.fail(plan, "broken"):
            assert delta.finish is FinishReason.ERROR and delta.error == "broken"
            del self.open[delta.id]

    @rule(pick=st.integers(0, 300))
    def step(self, pick: int) -> None:
        plan = self.scheduler.plan_step()
        if plan is None:
            assert not self.open, "an open request is never left alone"
            return
        assert plan.given_tokens <= self.scheduler.limits.max_batched_tokens
        result = self.executor.execute(plan)
        if pick < 20 and self.open:  # leaves while its step is under way
            self.abort(pick)
        for delta in self.scheduler.commit(result):
            self._see(delta)

    def _see(self, delta: Delta) -> None:
        assert delta.id in self.open, "nothing after the end"
        self.tokens[delta.id] += delta.tokens
        tokens, finish = expected(self.open[delta.id], self.scheduler.limits.max_model_len)
        got = tuple(self.tokens[delta.id])
        assert got == tokens[: len(got)]
        if delta.finish is not None:
            assert (got, delta.finish) == (tokens, finish)
            del self.open[delta.id]

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.open:
                break
            self.step(300)
        assert not self.open and self.scheduler.idle
        pool, prefix = self.scheduler.pool, self.scheduler.prefix
        assert prefix.evictable == prefix.cached
        pool.give_back(prefix.evict(pool.pages))
        assert sorted(pool.free_pages()) == list(range(pool.pages))


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_more_requests_than_memory_all_finish_as_if_alone() -> None:
    scheduler = _scheduler(pages=12, page_size=2, running=8, batched=8)
    executor = _fake(scheduler)
    messages = {str(i): _request(str(i), (i, 1), max_tokens=20, seed=i) for i in range(8)}
    for message in messages.values():
        assert scheduler.add(message) is None
    tokens: dict[str, list[int]] = defaultdict(list)
    finishes = {}
    for delta in _drain(scheduler, executor):
        tokens[delta.id] += delta.tokens
        finishes[delta.id] = delta.finish
    for name, message in messages.items():
        assert (tuple(tokens[name]), finishes[name]) == expected(message, 24)
    assert scheduler.stats().preemptions_total > 0


def test_a_repeated_prompt_starts_from_the_prefix_cache() -> None:
    scheduler = _scheduler(pages=16, page_size=2)
    executor = _fake(scheduler)
    prompt = (1, 2, 3, 4, 5)
    scheduler.add(_request("a", prompt))
    first = _drain(scheduler, executor)
    scheduler.add(_request("b", prompt))
    second = _drain(scheduler, executor)
    assert [d.tokens for d in first] == [d.tokens for d in second]
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, 4)


def test_an_aligned_prompt_is_matched_short_of_its_last_token() -> None:
    scheduler = _scheduler(pages=16, page_size=2)
    executor = _fake(scheduler)
    for name in ("a", "b"):
        scheduler.add(_request(name, (1, 2, 3, 4)))
        deltas = _drain(scheduler, executor)
    assert deltas[0].cached_tokens == 2  # the last token must be computed to sample after it


def test_a_late_result_of_a_departed_request_is_dropped() -> None:
    scheduler = _scheduler()
    executor = _fake(scheduler)
    scheduler.add(_request("a"))
    plan = scheduler.plan_step()
    assert plan is not None
    result = executor.execute(plan)
    scheduler.abort(("a",))
    scheduler.add(_request("b", (5, 6)))
    assert scheduler.commit(result) == []
    scheduler.check()
    assert {d.id for d in _drain(scheduler, executor)} == {"b"}


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    scheduler = _scheduler(pages=40, page_size=2, batched=5, length=60)
    executor = _fake(scheduler)
    scheduler.add(_request("short", (1,), max_tokens=30, ignore_eos=True))
    first = scheduler.plan_step()
    assert first is not None
    scheduler.commit(executor.execute(first))
    scheduler.add(_request("long", tuple(range(20)), max_tokens=1))
    for _ in range(4):
        plan = scheduler.plan_step()
        assert plan is not None
        assert sorted(row.given for row in plan.rows) == [1, 4]
        scheduler.commit(executor.execute(plan))


def test_a_policy_is_told_for_how_many_drafts_there_is_room() -> None:
    """A step full of prompts has none: nothing is promised that cannot come."""
    scheduler = _scheduler(pages=40, page_size=2, batched=6, length=60)
    executor = _fake(scheduler)
    scheduler.add(_request("short", (1,), max_tokens=30, ignore_eos=True))
    scheduler.commit(executor.execute(_plan(scheduler)))
    plan = _plan(scheduler)
    assert plan.load.room == 5
    scheduler.commit(executor.execute(plan))
    scheduler.add(_request("long", tuple(range(20)), max_tokens=1))
    plan = _plan(scheduler)
    assert plan.load.room == 0
    scheduler.commit(executor.execute(plan))
    assert 0 <= _plan_of_few_pages().load.room <= 4


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan_step()
    assert plan is not None
    return plan


def _plan_of_few_pages() -> StepPlan:
    """One request that holds nearly all pages."""
    scheduler = _scheduler(pages=4, page_size=2, batched=8, length=8)
    executor = _fake(scheduler)
    scheduler.add(_request("a", (1, 2, 3, 4), max_tokens=4, ignore_eos=True))
    scheduler.commit(executor.execute(_plan(scheduler)))
    return _plan(scheduler)


def test_a_thousand_requests_leave_memory_flat() -> None:
    scheduler = _scheduler(pages=16, page_size=2)
    executor = _fake(scheduler)
    rng = random.Random(0)
    for i in range(1000):
        prompt = tuple(rng.randrange(5) for _ in range(rng.randrange(1, 12)))
        scheduler.add(_request(str(i), prompt, max_tokens=3))
        _drain(scheduler, executor)
    assert not scheduler.by_id and not scheduler.running
    assert len(scheduler.prefix._leaves) <= 2 * 16 + 64


def test_end_of_sequence_goes_before_the_length_limit() -> None:
    scheduler = _scheduler()
    executor = _fake(scheduler)
    for seed in range(200):
        message = _request("x", max_tokens=3, seed=seed)
        tokens, finish = expected(message, 24)
        if len(tokens) == 3 and tokens[-1] == EOS:
            break
    assert finish is FinishReason.STOP
    scheduler.add(message)
    assert _drain(scheduler, executor)[-1].finish is FinishReason.STOP


def test_a_prompt_that_cannot_fit_is_answered_with_an_error() -> None:
    scheduler = _scheduler(length=8)
    for prompt in ((), tuple(range(8))):
        delta = scheduler.add(_request("a", prompt))
        assert delta is not None and delta.finish is FinishReason.ERROR and delta.error
    assert scheduler.idle
