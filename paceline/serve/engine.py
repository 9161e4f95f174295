"""What the routes need of an engine, and the mailboxes between it and the open HTTP requests.

`Engine` is the seam: `paceline.serve.engine_client` reaches a real engine process through it,
`paceline.serve.fake` is its double. A `Subscription` holds what arrived for one HTTP request and
was not read yet, merged into one `Delta` a choice, so that a slow reader costs no more memory than
its own output and never holds up anyone. Knows nothing of sockets, processes, HTTP or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.types import AddRequest, Delta, EngineStats, FinishReason


class Engine(Protocol):
    """An engine that serves requests. All methods are called on the event loop's thread."""

    @property
    def alive(self) -> bool:
        """Whether it takes requests: ready, and neither stopping nor dead."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest counters that it sent."""
        ...

    @property
    def open_requests(self) -> int:
        """Submitted requests that have not ended (each choice is one)."""
        ...

    def submit(self, requests: Sequence[AddRequest]) -> Subscription:
        """Start all `requests` as one. Raises EngineUnavailable. Close what it returns."""
        ...


class _Pending:
    """What waits for the reader of one request: all tokens since the last `take`."""

    __slots__ = ("accepted", "cached_tokens", "drafted", "error", "finish", "tokens")

    def __init__(self, delta: Delta) -> None:
        self.tokens = list(delta.tokens)
        self.finish = delta.finish
        self.error = delta.error
        self.cached_tokens = delta.cached_tokens
        self.drafted = delta.drafted
        self.accepted = delta.accepted

    def add(self, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)
        self.finish = delta.finish
        self.error = delta.error
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.drafted += delta.drafted
        self.accepted += delta.accepted

    def delta(self, request_id: str) -> Delta:
        return Delta(
            id=request_id,
            tokens=tuple(self.tokens),
            finish=self.finish,
            error=self.error,
            cached_tokens=self.cached_tokens,
            drafted=self.drafted,
            accepted=self.accepted,
        )


class Subscription:
    """The deltas of one HTTP request: of all its choices, each an engine request of its own.

    One reader calls `take`. `close` may be called any time, from the reader or from whoever notices
    that the client is gone; it aborts what still runs and wakes the reader.
    """

    def __init__(
        self, ids: Sequence[str], on_abandon: Callable[[Subscription, Sequence[str]], None]
    ) -> None:
        self._running = dict.fromkeys(ids)
        self._on_abandon = on_abandon
        self._pending: dict[str, _Pending] = {}
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False

    @property
    def running(self) -> tuple[str, ...]:
        """Ids that have not ended, in order."""
        return tuple(self._running)

    async def take(self) -> list[Delta]:
        """All that arrived since the last call, one merged delta an id; waits for the first.

        An empty list means that the subscription was closed, or that everything has ended.
        """
        while not self._pending:
            if self.closed or not self._running:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, {}
        return [waiting.delta(request_id) for request_id, waiting in pending.items()]

    def deliver(self, delta: Delta) -> None:
        """Called by the engine's side: one more delta for the reader."""
        if delta.id not in self._running:
            return
        if delta.finish is not None:
            del self._running[delta.id]
        waiting = self._pending.get(delta.id)
        if waiting is None:
            self._pending[delta.id] = _Pending(delta)
        else:
            waiting.add(delta)
        self._wake()

    def abandon(self, request_id: str) -> None:
        """Abort one choice: its reader has all the text that it wants."""
        if request_id in self._running:
            del self._running[request_id]
            self._on_abandon(self, (request_id,))

    def close(self) -> None:
        """Abort what still runs, forget what waits, wake the reader. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._pending.clear()
        if self._running:
            ids = tuple(self._running)
            self._running.clear()
            self._on_abandon(self, ids)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Exchange:
    """Which open request belongs to which subscription; shared by every kind of `Engine`."""

    def __init__(self, send_abort: Callable[[Sequence[str]], None]) -> None:
        self._send_abort = send_abort
        self._subscriptions: dict[str, Subscription] = {}

    def __len__(self) -> int:
        return len(self._subscriptions)

    def open(self, ids: Sequence[str]) -> Subscription:
        assert not any(request_id in self._subscriptions for request_id in ids)
        subscription = Subscription(ids, self._abandoned)
        self._subscriptions.update(dict.fromkeys(ids, subscription))
        return subscription

    def deliver(self, delta: Delta) -> None:
        """Hand one delta to its reader; one for a request that has ended is dropped."""
        subscription = self._subscriptions.get(delta.id)
        if subscription is None:
            return
        if delta.finish is not None:
            del self._subscriptions[delta.id]
        subscription.deliver(delta)

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        for request_id in list(self._subscriptions):
            self.deliver(Delta(id=request_id, finish=FinishReason.ERROR, error=message))

    def _abandoned(self, subscription: Subscription, ids: Sequence[str]) -> None:
        for request_id in ids:
            self._subscriptions.pop(request_id, None)
        self._send_abort(ids)
