from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench.loops import closed_loop, open_loop
from paceline.bench.record import RequestRecord
from paceline.bench.workload import Prompt, load_prompts

PROMPTS = load_prompts(None, "chat")


class FakeSend:
    """Lasts `turns[index]` turns of the event loop and counts what is in flight."""

    def __init__(self, turns: list[int]) -> None:
        self.turns = turns
        self.in_flight = self.most = 0

    async def __call__(self, index: int, prompt: Prompt, *, due: float) -> RequestRecord:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        for _ in range(self.turns[index]):
            await asyncio.sleep(0)
        self.in_flight -= 1
        return RequestRecord(index=index, prompt=prompt.id, due=due, sent=due, first=None, end=due)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 25))
def test_a_closed_loop_never_exceeds_its_concurrency(turns: list[int], concurrency: int) -> None:
    send = FakeSend(turns)
    prompts = PROMPTS[: len(turns)]
    records = asyncio.run(closed_loop(prompts, send, concurrency=concurrency, clock=lambda: 0.0))
    assert send.most == min(concurrency, len(turns))
    assert [r.index for r in records] == list(range(len(turns)))
    assert [r.prompt for r in records] == [p.id for p in prompts]


def test_a_closed_loop_of_one_is_due_when_the_one_before_has_ended() -> None:
    moments = iter([1.0, 2.0, 3.0])
    records = asyncio.run(
        closed_loop(PROMPTS[:3], FakeSend([1] * 3), concurrency=1, clock=lambda: next(moments))
    )
    assert [r.due for r in records] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_an_open_loop_is_due_on_time_and_keeps_its_limit(concurrency: int) -> None:
    send = FakeSend([5] * 10)
    offsets = [i * 1e-4 for i in range(10)]
    records = asyncio.run(
        open_loop(PROMPTS[:10], send, concurrency=concurrency, offsets=offsets, clock=lambda: 70.0)
    )
    assert [r.due for r in records] == [70.0 + offset for offset in offsets]
    assert send.most <= concurrency


def test_an_open_loop_does_not_wait_for_the_one_before() -> None:
    send = FakeSend([50] * 5)
    asyncio.run(open_loop(PROMPTS[:5], send, concurrency=5, offsets=[0.0] * 5, clock=lambda: 0.0))
    assert send.most == 5
