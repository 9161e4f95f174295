"""The ragged batch against what its rows say, token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.pool import PagePool
from paceline.exec.batch import RaggedBatch
from paceline.exec.drafter import Drafts
from paceline.exec.slots import Slots
from paceline.plan.step import PLAIN, Admission, Choice, PageUpdate, Row, StepPlan
from paceline.types import SamplingParams

CPU = torch.device("cpu")
PAGE = 4

ROWS = st.lists(
    st.tuples(
        st.integers(0, 30),  # start
        st.one_of(st.just(()), st.lists(st.integers(0, 99), min_size=1, max_size=80).map(tuple)),
        st.booleans(),  # samples
        st.sampled_from([0.0, 0.7]),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(ROWS, st.randoms(use_true_random=False))
def test_tokens_positions_and_places(rows, rng) -> None:  # type: ignore[no-untyped-def]
    slots = Slots.allocate(8, 40, CPU)
    numbers = rng.sample(range(8), len(rows))
    pool = PagePool(400, PAGE)
    order = rng.sample(range(400), 400)
    made, admissions, updates, last = [], [], [], {}
    for slot, (start, tokens, samples, temperature) in zip(numbers, rows, strict=True):
        row = Row(
            slot=slot, generation=1, start=start, tokens=tokens, samples=samples or not tokens
        )
        made.append(row)
        params = SamplingParams(temperature=temperature, seed=slot, top_k=5 * (slot % 2))
        admissions.append(Admission(slot=slot, params=params))
        pages = tuple(order.pop() for _ in range(-(-(start + row.given) // PAGE)))
        updates.append(PageUpdate(slot=slot, first=0, pages=pages))
        slots.length[slot] = start if not tokens else 77  # given rows bring their start along
        slots.last_token[slot] = last[slot] = rng.randrange(100)
    plan = StepPlan(
        rows=tuple(made),
        choice=Choice(shape=PLAIN, reason="test"),
        reservation=pool.reserve({}),
        admissions=tuple(admissions),
        page_updates=tuple(updates),
    )
    slots.prepare(plan)
    batch = RaggedBatch.build(plan, Drafts.none(plan), slots)

    at = 0
    for i, (row, update) in enumerate(zip(made, updates, strict=True)):
        tokens = row.tokens or (last[row.slot],)
        assert batch.view.bounds[i] == at
        for j, token in enumerate(tokens):
            position = row.start + j
            assert batch.tokens[at + j] == token
            assert batch.view.positions[at + j] == position
            place = update.pages[position // PAGE] * PAGE + position % PAGE
            assert batch.view.cache_index[at + j] == place
            if row.given <= 64:
                assert batch.view.ancestors[at + j].item() & (2**64 - 1) == (2 << j) - 1
        at += row.given
        assert batch.view.contexts[i] == row.start and batch.ends[i] == row.start + row.given
        assert batch.view.pages[i, : len(update.pages)].tolist() == list(update.pages)
    assert len(batch.tokens) == at == batch.view.bounds[-1]

    sampling = [i for i, row in enumerate(made) if row.samples]
    assert batch.sample_rows.tolist() == sampling
    assert batch.sample_index.tolist() == [batch.view.bounds[i + 1] - 1 for i in sampling]
    assert batch.sampling.positions.tolist() == [made[i].start + made[i].given for i in sampling]
    assert batch.sampling.seeds.tolist() == [made[i].slot for i in sampling]
    warm = [i for i in sampling if slots.params[made[i].slot].temperature > 0]
    assert batch.sampling.samples == bool(warm)
    assert batch.sampling.filtered == tuple(
        j for j, i in enumerate(sampling) if i in warm and made[i].slot % 2
    )


def test_commit_is_what_the_next_step_starts_from() -> None:
    slots = Slots.allocate(4, 4, CPU)
    slots.commit(torch.tensor([2, 0]), torch.tensor([9, 4]), torch.tensor([55, 66]))
    assert slots.length.tolist() == [4, 0, 9, 0]
    assert slots.last_token.tolist() == [66, 0, 55, 0]
