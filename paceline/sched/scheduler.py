"""The scheduler: which tokens of which requests the next step computes, and what it leaves behind.

Pure Python over page numbers and slot numbers. A step is planned by `plan_step` and ended by
exactly one of `commit` and `fail`. There are no phases: a running request has `pending` known
tokens whose K/V is missing; a prompt is many of them, decoding is one. Running requests are served
in order of arrival, decoding ones always, prompts with what is left of the step's token budget.
When pages run out the last arrival gives way: its pages go to the prefix cache, it waits, and is
computed again.

Knows no tensors, no text, no drafter; speculation is a number of drafts on a row of the plan.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from paceline.cache.pool import PagePool
from paceline.cache.prefix import PrefixCache, owned
from paceline.cache.slots import SlotNumbers
from paceline.plan.policy import SpeculationPolicy
from paceline.plan.step import Admission, PageUpdate, Row, RowResult, StepPlan, StepResult
from paceline.sched.counters import Counters
from paceline.sched.estimates import Estimates
from paceline.sched.request import Request, Status
from paceline.types import AddRequest, Delta, EngineStats, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a step and a request, in tokens and requests.

    max_batched_tokens >= max_running, so that every decoding request fits into each step;
    max_model_len fits into the pages, so that a request alone always can run.
    """

    max_running: int
    max_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class Scheduler:
    """Owns all requests and all bookkeeping of pages and slots."""

    def __init__(self, limits: Limits, pool: PagePool, policy: SpeculationPolicy) -> None:
        assert limits.max_batched_tokens >= limits.max_running
        assert pool.pages >= pool.pages_for(limits.max_model_len)
        self.limits = limits
        self.pool = pool
        self.policy = policy
        self.prefix = PrefixCache(pool.page_size)
        self.slots = SlotNumbers(limits.max_running)
        self.estimates = Estimates()
        self.running: list[Request] = []  # in order of arrival
        self.waiting: deque[Request] = deque()
        self.by_id: dict[str, Request] = {}
        self._planned: dict[int, Request] = {}  # by slot, while a step is under way
        self.counters = Counters()

    # Requests come and go ---------------------------------------------------------------------

    def add(self, message: AddRequest) -> Delta | None:
        """Queue a request. One that can never run is answered at once with an error delta."""
        length = len(message.prompt)
        if message.id in self.by_id:
            return _error(message.id, "a request of this id is under way")
        if not 1 <= length < self.limits.max_model_len:
            limit = self.limits.max_model_len
            return _error(message.id, f"the prompt has {length} tokens, the context holds {limit}")
        request = Request.of(message, self.limits.max_model_len)
        self.by_id[request.id] = request
        self.waiting.append(request)
        return None

    def abort(self, ids: Iterable[str]) -> None:
        """Drop requests wherever they are; their pages are free (or cached) at once."""
        for request_id in ids:
            request = self.by_id.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    # Planning -----------------------------------------------------------------------------------

    def plan_step(self) -> StepPlan | None:
        """The next step, its pages reserved; None if there is nothing to compute."""
        assert not self._planned, "a step is under way"
        rows: list[Row] = []
        wanted: dict[int, int] = {}
        decodes = sum(request.pending == 1 for request in self.running)
        prefill_budget = self.limits.max_batched_tokens - decodes
        for request in tuple(self.running):
            if request.status is not Status.RUNNING:
                continue  # gave way to one before it
            count = 1 if request.pending == 1 else min(request.pending, prefill_budget)
            if count and self._find_room(request, count, wanted):
                prefill_budget -= count if request.pending > 1 else 0
                rows.append(self._plan_row(request, count))
        admissions = []
        while prefill_budget > 0 and self.waiting and self.slots.free:
            request = self.waiting[0]
            if not self._admit(request, sum(wanted.values())):
                break
            admissions.append(
                Admission(
                    slot=request.slot,
                    params=request.params,
                    tokens=tuple(request.tokens),
                    parent_page=request.pages[-1] if request.pages else -1,
                )
            )
            count = min(request.pending, prefill_budget)
            prefill_budget -= count
            wanted[request.slot] = self._lacking(request, count)
            rows.append(self._plan_row(request, count))
        if not rows:
            return None
        return self._plan(rows, wanted, admissions)

    def _plan(
        self, rows: list[Row], wanted: dict[int, int], admissions: list[Admission]
    ) -> StepPlan:
        drafting = {
            row.slot: row.lean
            for row in rows
            if row.given == 1 and row.samples and self._most_drafts(row, 1)
        }
        spare_tokens = self.limits.max_batched_tokens - sum(row.given for row in rows)
        spare_pages = self.pool.free + self.prefix.evictable - sum(wanted.values())
        load = self.estimates.load(
            rows, drafting, running=len(self.running), waiting=len(self.waiting),
            room=self._room(len(rows), spare_tokens, spare_pages),
        )  # fmt: skip
        choice = self.policy.choose(load)
        shares = self.estimates.shares(choice, load, drafting)
        rows = self._widen(rows, wanted, shares, tokens=spare_tokens, pages=spare_pages)
        short = sum(wanted.values()) - self.pool.free
        if short > 0:
            self.pool.give_back(self.prefix.evict(short))
        reservation = self.pool.reserve(wanted)
        updates = []
        admitted = {admission.slot for admission in admissions}
        for row in rows:
            request = self._planned[row.slot]
            fresh = reservation.pages.get(row.slot, ())
            first = 0 if row.slot in admitted else len(request.pages)
            pages = (*request.pages[first:], *fresh)
            if pages:
                updates.append(PageUpdate(slot=row.slot, first=first, pages=pages))
        return StepPlan(
            rows=tuple(rows),
            choice=choice,
            load=load,
            reservation=reservation,
            admissions=tuple(admissions),
            page_updates=tuple(updates),
        )

    def _room(self, rows: int, tokens: int, pages: int) -> int:
        """Draft tokens that a step could carry that has so much to spare: about.

        A row's last page is half empty in the mean.
        """
        size = self.pool.page_size
        return max(min(tokens, pages * size + rows * size // 2), 0)

    def _widen(
        self, rows: list[Row], wanted: dict[int, int], shares: Mapping[int, int], *, tokens: int,
        pages: int,
    ) -> list[Row]:  # fmt: skip
        """Let rows carry their share of drafts by slot, as far as tokens and pages to spare go.

        Where tokens are short the small shares come first and the large ones get even parts of the
        rest. Drafts never preempt: who runs and who waits is the same at every depth.
        """
        most = {row.slot: self._most_drafts(row, shares.get(row.slot, 0)) for row in rows}
        open_rows = sum(count > 0 for count in most.values())
        drafts = {}
        for slot, count in sorted(most.items(), key=lambda item: item[1]):
            if not count:
                continue
            request = self._planned[slot]
            own = len(request.pages) + wanted[slot]
            room = (own + pages) * self.pool.page_size - request.computed - 1
            count = max(min(count, tokens // open_rows, room), 0)
            extra = max(self._lacking(request, 1 + count) - wanted[slot], 0)
            wanted[slot] += extra
            drafts[slot] = count
            tokens, pages, open_rows = tokens - count, pages - extra, open_rows - 1
        return [
            dataclasses.replace(row, drafts=drafts[row.slot]) if drafts.get(row.slot) else row
            for row in rows
        ]

    def _most_drafts(self, row: Row, share: int) -> int:
        """Of its share what the row's request has use for: none after its last token."""
        request = self._planned[row.slot]
        left = request.max_tokens - request.output_length - 1
        return max(min(share, left, request.params.max_draft_tokens), 0)

    def _plan_row(self, request: Request, count: int) -> Row:
        self._planned[request.slot] = request
        start = request.computed
        known = () if request.on_device else tuple(request.tokens[start : start + count])
        return Row(
            slot=request.slot,
            generation=request.generation,
            start=start,
            tokens=known,
            samples=count == request.pending,
            lean=self.estimates.acceptance.lean(request.id),
        )

    def _lacking(self, request: Request, count: int) -> int:
        """Pages that the request needs on top of its own to compute `count` tokens."""
        return max(self.pool.pages_for(request.computed + count) - len(request.pages), 0)

    def _find_room(self, request: Request, count: int, wanted: dict[int, int]) -> bool:
        """Room for a running request's next tokens: preempts later arrivals, at last itself."""
        lacking = self._lacking(request, count)
        while sum(wanted.values()) + lacking > self.pool.free + self.prefix.evictable:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        wanted[request.slot] = lacking
        return True

    def _admit(self, request: Request, taken: int) -> bool:
        """Start a waiting request if its known tokens fit beside what runs; keeps arrival order.

        One page per running request is left alone, or they would soon preempt the newcomer.
        """
        match = self.prefix.match(request.tokens[:-1])
        self.prefix.lock(match)
        pages = [node.page for node in match.path()]
        lacking = self.pool.pages_for(len(request.tokens) + 1) - len(pages)
        if taken + lacking + len(self.running) > self.pool.free + self.prefix.evictable:
            if self.running:
                self.prefix.unlock(match)
                return False
            assert lacking <= self.pool.free + self.prefix.evictable, "a lone request must fit"
        self.waiting.popleft()
        request.slot, request.generation = self.slots.take()
        request.pages, request.node = pages, match
        request.computed = len(pages) * self.pool.page_size
        if not request.preemptions:
            request.cached_tokens = request.computed
            self.counters.cached_tokens += request.computed
            self.counters.prompt_tokens += request.prompt_length
        request.status, request.on_device = Status.RUNNING, False
        self.running.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        """Take slot and pages from a running request; it waits at the head of the line."""
        self._leave(request)
        request.status = Status.WAITING
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(request)

    # Ending a step -------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Delta]:
        """Apply a step: the only place where a request advances. Returns what clients shall see."""
        plan = result.plan
        deltas = []
        kept = {}
        for row, done in zip(plan.rows, result.rows, strict=True):
            request = self._tenant(row)
            if request is not None:  # pages of drafts that were not accepted go back
                end = row.start + row.given + done.accepted
                kept[row.slot] = max(self.pool.pages_for(end) - len(request.pages), 0)
        pages = plan.reservation.commit(kept)
        self.counters.step(result)
        tenants = [self._tenant(row) for row in plan.rows]
        self.estimates.learn(result, [None if r is None else r.id for r in tenants], self.policy)
        for row, done in zip(plan.rows, result.rows, strict=True):
            request = self._tenant(row)
            if request is not None:
                request.pages.extend(pages.get(row.slot, ()))
                delta = self._advance(request, row, done)
                if delta is not None:
                    deltas.append(delta)
        self._planned.clear()
        return deltas

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """The step could not be computed: its requests end with an error, the others go on."""
        plan.reservation.release()
        failed = [r for row in plan.rows if (r := self._tenant(row)) is not None]
        self._planned.clear()
        for request in failed:
            self._finish(request, FinishReason.ERROR, keep_prefix=False)
        return [_error(request.id, message) for request in failed]

    def _tenant(self, row: Row) -> Request | None:
        """The request a row was planned for, unless it has left since."""
        request = self._planned[row.slot]
        there = request.status is Status.RUNNING and request.generation == row.generation
        return request if there else None

    def _advance(self, request: Request, row: Row, done: RowResult) -> Delta | None:
        request.computed = row.start + row.given + done.accepted
        if not row.samples:
            return None
        if request.output_length == 0:
            self._share(request)  # later requests may start from this prompt
        taken: list[int] = []
        finish = None
        for token in done.tokens:
            taken.append(token)
            finish = self._ends(request, token, len(taken))
            if finish is not None:
                break
        request.tokens.extend(taken)
        request.on_device = True
        drafted, accepted = self.counters.row(done, len(taken), ended=finish is not None)
        if finish is not None:
            request.computed = min(request.computed, len(request.tokens) - 1)
            self._finish(request, finish)
        return Delta(
            id=request.id,
            tokens=tuple(taken),
            finish=finish,
            cached_tokens=request.cached_tokens,
            drafted=drafted,
            accepted=accepted,
        )

    def _ends(self, request: Request, token: int, taken: int) -> FinishReason | None:
        """Does this token end the request? End-of-sequence goes before the length limit."""
        params = request.params
        if token in self.limits.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token in params.stop_token_ids:
            return FinishReason.STOP
        if request.output_length + taken >= request.max_tokens:
            return FinishReason.LENGTH
        return None

    def _share(self, request: Request) -> None:
        """Put the request's whole pages into the prefix cache and hold the path."""
        assert request.node is not None
        node = self.prefix.insert(request.tokens[: request.computed], request.pages)
        self.prefix.lock(node)
        self.prefix.unlock(request.node)
        request.node = node

    def _finish(self, request: Request, finish: FinishReason, *, keep_prefix: bool = True) -> None:
        if request.status is Status.RUNNING:
            self._leave(request, keep_prefix=keep_prefix)
        else:
            self.waiting.remove(request)
        request.status, request.finish = Status.FINISHED, finish
        del self.by_id[request.id]
        self.estimates.forget(request.id)
        self.counters.finished += 1

    def _leave(self, request: Request, *, keep_prefix: bool = True) -> None:
        """Give up slot and pages; what is computed stays in the prefix cache."""
        assert request.node is not None
        if keep_prefix:
            self._share(request)
        self.pool.give_back(owned(request.pages, request.node))
        self.prefix.unlock(request.node)
        self.slots.give_back(request.slot)
        self.running.remove(request)
        request.pages, request.node, request.slot, request.computed = [], None, -1, 0

    # Seen from outside ----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        c = self.counters
        return EngineStats(
            speculation=msgspec.structs.replace(
                c.speculation(),
                prediction=self.estimates.prediction.stats(),
                reliability=self.estimates.acceptance.confidence.reliability(),
            ),
            running=len(self.running),
            waiting=len(self.waiting),
            pages_total=self.pool.pages,
            pages_free=self.pool.free,
            pages_cached=self.prefix.evictable,
            steps_total=c.steps,
            step_seconds_total=c.seconds,
            prompt_tokens_total=c.prompt_tokens,
            cached_prompt_tokens_total=c.cached_tokens,
            committed_tokens_total=c.committed,
            drafted_tokens_total=c.drafted,
            accepted_tokens_total=c.accepted,
            preemptions_total=c.preemptions,
            finished_total=c.finished,
        )

    def check(self) -> None:
        """Assert every invariant; for tests, between steps: free + cached + owned == all."""
        assert not self._planned
        own: list[int] = []
        locks: dict[int, int] = {}
        for request in self.running:
            assert request.status is Status.RUNNING and request.node is not None
            own += owned(request.pages, request.node)
            for node in request.node.path():
                locks[id(node)] = locks.get(id(node), 0) + 1
            assert len(request.pages) >= self.pool.pages_for(request.computed)
            assert request.pending >= 1
        nodes = list(self.prefix.nodes())
        everything = [*self.pool.free_pages(), *own, *(node.page for node in nodes)]
        assert sorted(everything) == list(range(self.pool.pages)), "a page is lost or held twice"
        assert all(node.locks == locks.get(id(node), 0) for node in nodes)
        assert self.prefix.cached == len(nodes)
        assert self.prefix.evictable == sum(node.locks == 0 for node in nodes)
        assert self.slots.free + len(self.running) == self.slots.count
        assert len(self.by_id) == len(self.running) + len(self.waiting)


def _error(request_id: str, message: str) -> Delta:
    return Delta(id=request_id, finish=FinishReason.ERROR, error=message)
