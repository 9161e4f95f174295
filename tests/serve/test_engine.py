"""Subscriptions: what waits is merged, ends once, and is aborted when nobody wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.serve.engine import Exchange, Subscription
from paceline.types import Delta, FinishReason

END = FinishReason.LENGTH


class Aborts(list[str]):
    def __call__(self, ids: Sequence[str]) -> None:
        self.extend(ids)


@pytest.fixture
def aborts() -> Aborts:
    return Aborts()


@pytest.fixture
def exchange(aborts: Aborts) -> Exchange:
    return Exchange(aborts)


def take(subscription: Subscription) -> list[Delta]:
    return asyncio.run(subscription.take())


def test_deltas_merge_while_they_wait(exchange: Exchange) -> None:
    subscription = exchange.open(["a", "b"])
    exchange.deliver(Delta(id="a", tokens=(1, 2), cached_tokens=16))
    exchange.deliver(Delta(id="b", tokens=(9,)))
    exchange.deliver(Delta(id="a", tokens=(3,), finish=END))
    assert take(subscription) == [
        Delta(id="a", tokens=(1, 2, 3), finish=END, cached_tokens=16),
        Delta(id="b", tokens=(9,)),
    ]
    assert subscription.running == ("b",)
    assert len(exchange) == 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.lists(st.integers(0, 9), max_size=3),
        st.integers(0, 5),
        st.integers(0, 5),
        st.booleans(),
    ),
    max_size=20,
)


@given(STEPS)
def test_however_deltas_merge_tokens_and_drafts_add_up(
    steps: list[tuple[str, list[int], int, int, bool]],
) -> None:
    """The last value of each step says whether the reader comes before the next."""
    subscription = Exchange(Aborts()).open(["a", "b"])
    got: list[Delta] = []
    for name, tokens, drafted, accepted, read in steps:
        subscription.deliver(
            Delta(id=name, tokens=tuple(tokens), drafted=drafted, accepted=accepted)
        )
        if read:
            got += take(subscription)
    for name in "ab":
        subscription.deliver(Delta(id=name, finish=END))
    got += take(subscription)
    for name in "ab":
        sent = [step for step in steps if step[0] == name]
        mine = [delta for delta in got if delta.id == name]
        assert [token for delta in mine for token in delta.tokens] == [
            token for step in sent for token in step[1]
        ]
        assert sum(delta.drafted for delta in mine) == sum(step[2] for step in sent)
        assert sum(delta.accepted for delta in mine) == sum(step[3] for step in sent)


def test_a_reader_wakes_when_something_comes(exchange: Exchange) -> None:
    async def scenario() -> list[Delta]:
        subscription = exchange.open(["a"])
        reader = asyncio.create_task(subscription.take())
        await asyncio.sleep(0)
        exchange.deliver(Delta(id="a", tokens=(1,)))
        return await reader

    assert asyncio.run(scenario()) == [Delta(id="a", tokens=(1,))]


def test_nothing_more_after_the_end(exchange: Exchange, aborts: Aborts) -> None:
    subscription = exchange.open(["a"])
    exchange.deliver(Delta(id="a", tokens=(1,), finish=END))
    exchange.deliver(Delta(id="a", tokens=(2,)))
    assert take(subscription) == [Delta(id="a", tokens=(1,), finish=END)]
    assert take(subscription) == []
    subscription.close()
    assert aborts == []


def test_close_aborts_what_runs_and_wakes_the_reader(exchange: Exchange, aborts: Aborts) -> None:
    async def scenario() -> list[Delta]:
        subscription = exchange.open(["a", "b", "c"])
        exchange.deliver(Delta(id="b", finish=END))
        await subscription.take()
        reader = asyncio.create_task(subscription.take())
        await asyncio.sleep(0)
        subscription.close()
        subscription.close()
        return await reader

    assert asyncio.run(scenario()) == []
    assert aborts == ["a", "c"]
    assert len(exchange) == 0


def test_what_waits_is_forgotten_by_close(exchange: Exchange) -> None:
    subscription = exchange.open(["a"])
    exchange.deliver(Delta(id="a", tokens=(1,)))
    subscription.close()
    assert take(subscription) == []


def test_abandon_aborts_one_choice_only(exchange: Exchange, aborts: Aborts) -> None:
    subscription = exchange.open(["a", "b"])
    subscription.abandon("a")
    subscription.abandon("a")
    exchange.deliver(Delta(id="a", tokens=(1,)))
    exchange.deliver(Delta(id="b", tokens=(2,)))
    assert take(subscription) == [Delta(id="b", tokens=(2,))]
    assert aborts == ["a"]


def test_fail_all_ends_everything_with_the_reason(exchange: Exchange, aborts: Aborts) -> None:
    first, second = exchange.open(["a", "b"]), exchange.open(["c"])
    exchange.deliver(Delta(id="a", tokens=(1,)))
    exchange.fail_all("gone")
    assert take(first) == [
        Delta(id="a", tokens=(1,), finish=FinishReason.ERROR, error="gone"),
        Delta(id="b", finish=FinishReason.ERROR, error="gone"),
    ]
    assert take(second) == [Delta(id="c", finish=FinishReason.ERROR, error="gone")]
    assert len(exchange) == 0
    assert aborts == []


def test_a_slow_reader_holds_one_delta(exchange: Exchange) -> None:
    subscription = exchange.open(["a"])
    for token in range(10_000):
        exchange.deliver(Delta(id="a", tokens=(token,)))
    (merged,) = take(subscription)
    assert merged.tokens == tuple(range(10_000))
