"""A double of the engine: scripted tokens, no model, no process.

For tests of the HTTP layer and for measuring what that layer costs by itself. Steps like a real
engine: each step adds tokens to every running request and delivers them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.errors import EngineUnavailable
from paceline.serve.engine import Exchange, Subscription
from paceline.types import AddRequest, Delta, EngineStats, FinishReason, SpeculationStats


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a request generates, and how it ends. finish None: it never does."""

    tokens: Sequence[int]
    finish: FinishReason | None = FinishReason.LENGTH
    error: str | None = None


def counting_reply(request: AddRequest) -> Reply:
    """`max_tokens` ids, 0, 1, 2, ... and around at 256."""
    assert request.params.max_tokens is not None
    return Reply(tokens=[number % 256 for number in range(request.params.max_tokens)])


@dataclass
class _Running:
    request: AddRequest
    reply: Reply
    sent: int = 0


@dataclass(kw_only=True)
class FakeEngine:
    """An `Engine` that answers each request with `reply(request)`.

    step_s: pause between steps (0: as fast as the loop allows). tokens_per_step: of each request.
    drafts_per_step: draft tokens that each request claims to verify, as far as it wants drafts; all
    but one of a step's tokens claim to be drafts. speculation: what the stats say of it.
    requests, aborted: everything ever submitted and the ids ever aborted, for tests to look at.
    """

    reply: Callable[[AddRequest], Reply] = counting_reply
    step_s: float = 0.0
    tokens_per_step: int = 1
    cached_tokens: int = 0
    drafts_per_step: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    requests: list[AddRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._exchange = Exchange(self._abort)
        self._running: dict[str, _Running] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._committed = 0
        self._drafted = 0
        self._accepted = 0
        self._dead: str | None = None

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def open_requests(self) -> int:
        return len(self._exchange)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            committed_tokens_total=self._committed,
            drafted_tokens_total=self._drafted,
            accepted_tokens_total=self._accepted,
            speculation=self.speculation,
        )

    def submit(self, requests: Sequence[AddRequest]) -> Subscription:
        if self._dead is not None:
            raise EngineUnavailable(self._dead)
        subscription = self._exchange.open([request.id for request in requests])
        for request in requests:
            self.requests.append(request)
            self._running[request.id] = _Running(request, self.reply(request))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._step_until_idle())
        return subscription

    def die(self, reason: str) -> None:
        """As when the engine's process ends."""
        self._dead = reason
        self._running.clear()
        self._exchange.fail_all(reason)

    def _abort(self, ids: Sequence[str]) -> None:
        self.aborted.extend(ids)
        for request_id in ids:
            self._running.pop(request_id, None)

    async def _step_until_idle(self) -> None:
        while self._running:
            for running in list(self._running.values()):
                self._step(running)
            await asyncio.sleep(self.step_s)

    def _step(self, running: _Running) -> None:
        reply, start = running.reply, running.sent
        tokens = tuple(reply.tokens[start : start + self.tokens_per_step])
        running.sent += len(tokens)
        self._committed += len(tokens)
        wanted = running.request.params.max_draft_tokens
        drafted = min(self.drafts_per_step, wanted) if tokens else 0
        accepted = min(drafted, max(len(tokens) - 1, 0))
        self._drafted += drafted
        self._accepted += accepted
        over = running.sent >= len(reply.tokens) and reply.finish is not None
        if over:
            del self._running[running.request.id]
        if tokens or over:
            self._exchange.deliver(
                Delta(
                    id=running.request.id,
                    tokens=tokens,
                    finish=reply.finish if over else None,
                    error=reply.error if over else None,
                    cached_tokens=self.cached_tokens,
                    drafted=drafted,
                    accepted=accepted,
                )
            )
