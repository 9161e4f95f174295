"""Who sends next: the two ways to put a level's requests on the server.

Knows prompts and moments; not what sending is (`send` is an argument), so it needs no server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from paceline.bench.record import RequestRecord
from paceline.bench.workload import Prompt


class Send(Protocol):
    def __call__(self, index: int, prompt: Prompt, *, due: float) -> Awaitable[RequestRecord]: ...


async def closed_loop(
    prompts: Sequence[Prompt], send: Send, *, concurrency: int, clock: Callable[[], float]
) -> list[RequestRecord]:
    """Keep `concurrency` requests in flight: each is due when the one before it has ended."""
    records: list[RequestRecord] = []
    line = iter(enumerate(prompts))  # shared: each worker takes the next request

    async def worker() -> None:
        for index, prompt in line:
            records.append(await send(index, prompt, due=clock()))

    async with asyncio.TaskGroup() as workers:
        for _ in range(min(concurrency, len(prompts))):
            workers.create_task(worker())
    return sorted(records, key=lambda record: record.index)


async def open_loop(
    prompts: Sequence[Prompt],
    send: Send,
    *,
    concurrency: int,
    offsets: Sequence[float],
    clock: Callable[[], float],
) -> list[RequestRecord]:
    """Send request i `offsets[i]` seconds from now, whatever the others do.

    While `concurrency` requests are in flight, those that are due wait in order; their latency
    counts from the moment they were due, so an overloaded server cannot hide its queue here.
    """
    start = clock()
    places = asyncio.Semaphore(concurrency)

    async def one(index: int, prompt: Prompt) -> RequestRecord:
        due = start + offsets[index]
        await asyncio.sleep(max(0.0, due - clock()))
        async with places:
            return await send(index, prompt, due=due)

    async with asyncio.TaskGroup() as requests:
        tasks = [requests.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
    return [task.result() for task in tasks]
