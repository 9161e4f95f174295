"""A model that exists only as bookkeeping: it notices any page that is shared, lost or stale.

Each position of a page remembers the whole text up to it; a row may read its context only if every
position says what the request's own text says. The next token is a hash of the text and the seed.
"""

from __future__ import annotations

import zlib

from paceline.plan.step import RowResult, StepPlan, StepResult


def next_token(text: tuple[int, ...], seed: int, vocab: int) -> int:
    return zlib.crc32(repr((text, seed)).encode()) % vocab


def plain_text(prompt: tuple[int, ...], seed: int, *, vocab: int, count: int) -> tuple[int, ...]:
    """What a request alone, without pages, would generate."""
    text = tuple(prompt)
    for _ in range(count):
        text = (*text, next_token(text, seed, vocab))
    return text[len(prompt) :]


class FakeExecutor:
    """Executes plans on remembered texts instead of tensors."""

    def __init__(self, *, slots: int, page_size: int, vocab: int) -> None:
        self.page_size, self.vocab = page_size, vocab
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}  # (page, offset) -> text up to it
        self.tables: list[dict[int, int]] = [{} for _ in range(slots)]
        self.text: list[tuple[int, ...]] = [()] * slots  # committed
        self.last: list[int] = [-1] * slots
        self.seed: list[int] = [0] * slots

    def execute(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            assert admission.params.seed is not None
            self.seed[admission.slot] = admission.params.seed
            self.tables[admission.slot] = {}
        for update in plan.page_updates:
            for i, page in enumerate(update.pages, start=update.first):
                self.tables[update.slot][i] = page
        rows = tuple(self._row(row.slot, row.start, row.tokens, row.samples) for row in plan.rows)
        return StepResult(plan=plan, rows=rows, seconds=0.0)

    def _row(self, slot: int, start: int, given: tuple[int, ...], samples: bool) -> RowResult:
        if given:
            text = self._cell(slot, start - 1) if start else ()  # perhaps a prefix hit
        else:
            text, given = self.text[slot], (self.last[slot],)
        assert len(text) == start
        for i in range(start):
            assert self._cell(slot, i) == text[: i + 1], "a page holds another text"
        for token in given:
            text = (*text, token)
            self._write(slot, len(text) - 1, text)
        self.text[slot] = text
        if not samples:
            return RowResult()
        self.last[slot] = next_token(text, self.seed[slot], self.vocab)
        return RowResult(tokens=(self.last[slot],))

    def _cell(self, slot: int, position: int) -> tuple[int, ...]:
        page = self.tables[slot][position // self.page_size]
        return self.memory[page, position % self.page_size]

    def _write(self, slot: int, position: int, text: tuple[int, ...]) -> None:
        page = self.tables[slot][position // self.page_size]
        self.memory[page, position % self.page_size] = text
