"""The choice of a token against a plain, slow reading of its definition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.attention.reference import ReferenceKernels
from paceline.model import noise
from paceline.model.config import ModelConfig
from paceline.model.sampling import HEAD, SamplingView, choose, filter_rows
from paceline.types import SamplingParams

VOCAB = 3000
IDS = torch.arange(VOCAB, dtype=torch.int32)
KERNELS = ReferenceKernels(
    ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=32, intermediate_size=32,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32, rms_norm_eps=1e-5, max_position=8,
    ),
    8,
    torch.device("cpu"),
)  # fmt: skip


def view_of(params: list[SamplingParams], positions: list[int]) -> SamplingView:
    return SamplingView(
        positions=torch.tensor(positions),
        seeds=torch.tensor([p.seed for p in params]),
        temperature=torch.tensor([p.temperature for p in params]),
        top_p=torch.tensor([p.top_p for p in params]),
        top_k=torch.tensor([p.top_k for p in params]),
        min_p=torch.tensor([p.min_p for p in params]),
        samples=any(p.temperature > 0 for p in params),
        filtered=tuple(
            i
            for i, p in enumerate(params)
            if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        ),
    )


def random_logits(rows: int, seed: int, *, spread: float, grid: float = 0.0) -> torch.Tensor:
    """Normal logits; on a grid many of them are equal."""
    x = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    return (x / grid).round() * grid if grid else x


@dataclass(frozen=True)
class Filtered:
    """Ids that the filters leave, and those that rounding in float32 may add or remove."""

    kept: set[int]
    doubtful: set[int]


def by_definition(logits: torch.Tensor, params: SamplingParams) -> Filtered:
    """One row, token by token in float64: top-k, then top-p, then min-p of what is left.

    Tokens with the logit of one that is kept are kept.
    """
    order = logits.argsort(descending=True, stable=True).tolist()
    ranked = order[: params.top_k] if params.top_k else order
    p = logits.double()[ranked].softmax(-1).tolist()
    lowest, mass, doubtful = order[0], 0.0, set()
    for token, probability in zip(ranked, p, strict=True):
        inside = params.top_p >= 1 or mass < params.top_p
        likely = probability >= params.min_p * p[0]
        if inside and likely:
            lowest = token
        near_top_p = params.top_p < 1 and abs(mass - params.top_p) < 1e-5
        near_min_p = abs(probability - params.min_p * p[0]) <= 1e-5 * params.min_p * p[0]
        if near_top_p or (params.min_p > 0 and near_min_p):
            doubtful.add(logits[token].item())
        mass += probability
    values = logits.tolist()
    return Filtered(
        kept={i for i, value in enumerate(values) if value >= values[lowest]},
        doubtful={i for i, value in enumerate(values) if value in doubtful},
    )


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 1024, 1025, 2000, VOCAB, VOCAB + 7]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
PEAKED = SamplingParams(temperature=0.3, top_k=2000, seed=0)  # float32 mass is 1 before its end


@settings(deadline=None, max_examples=60)
@given(
    st.lists(PARAMS, min_size=1, max_size=5),
    st.integers(0, 10**6),
    st.floats(0.01, 8),
    st.sampled_from([0.0, 0.5]),
)
@example([PEAKED], 0, 4.0, 0.0)
@example([PEAKED, SamplingParams(temperature=1.0, min_p=1e-12, seed=0)], 0, 4.0, 0.0)
def test_filters_keep_what_their_definition_keeps(
    params: list[SamplingParams], seed: int, spread: float, grid: float
) -> None:
    logits = random_logits(len(params), seed, spread=spread, grid=grid)
    view = view_of(params, [0] * len(params))
    got = logits.clone()
    if view.filtered:
        filter_rows(got, view)
    for i, p in enumerate(params):
        if i not in view.filtered:
            assert torch.equal(got[i], logits[i])
            continue
        wanted = by_definition(logits[i], p)
        found = set((got[i] > -torch.inf).nonzero()[:, 0].tolist())
        assert (found ^ wanted.kept) <= wanted.doubtful
        left = sorted(found)
        assert torch.equal(got[i][left], logits[i][left])
        assert logits[i].argmax().item() in found


@settings(deadline=None, max_examples=40)
@given(PARAMS, st.integers(0, 10**6), st.floats(0.01, 8), st.integers(0, 2**31))
def test_the_choice_is_the_best_of_what_is_left_with_noise(
    params: SamplingParams, seed: int, spread: float, position: int
) -> None:
    logits = random_logits(1, seed, spread=spread)
    chosen = int(choose(logits.clone(), view_of([params], [position]), KERNELS))
    if params.temperature == 0:
        assert chosen == logits.argmax()
        return
    scaled = logits[0] / params.temperature
    wanted = by_definition(scaled, params)
    assert params.seed is not None
    key = noise.row_keys(torch.tensor([params.seed]), torch.tensor([position]))
    scores = scaled + noise.gumbel(key, IDS)[0]
    assert chosen in wanted.kept | wanted.doubtful
    sure = sorted(wanted.kept - wanted.doubtful)
    assert not sure or scores[chosen] >= scores[sure].max()


def test_a_flat_nucleus_wider_than_the_ranked_head_is_found() -> None:
    logits = torch.linspace(0, 0.01, VOCAB).repeat(3, 1)
    params = [
        SamplingParams(top_p=0.9, seed=0),
        SamplingParams(top_p=0.9, top_k=2000, seed=0),
        SamplingParams(top_p=0.9, min_p=0.999, seed=0),  # the last tenth of the logits' range
    ]
    filter_rows(logits, view_of(params, [0, 0, 0]))
    left = (logits > -torch.inf).sum(1).tolist()
    assert left[0] > HEAD and abs(left[0] - 0.9 * VOCAB) < 10
    assert abs(left[1] - 0.9 * 2000) < 10
    assert abs(left[2] - 0.1 * VOCAB) < 3


def test_equal_logits_are_kept_together() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, :10] = 1.0
    filter_rows(logits, view_of([SamplingParams(top_k=5, seed=0)] * 2, [0, 0]))
    assert (logits > -torch.inf).sum(1).tolist() == [VOCAB, 10]


def test_tokens_that_are_already_excluded_stay_so() -> None:
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[:, [7, 2000]] = torch.tensor([0.0, 1.0])
    params = [SamplingParams(top_k=40, seed=0), SamplingParams(top_p=0.99, seed=0)]
    params.append(SamplingParams(min_p=0.5, seed=0))
    filter_rows(logits, view_of(params, [0, 0, 0]))
    left = [row.nonzero()[:, 0].tolist() for row in logits > -torch.inf]
    assert left == [[7, 2000], [7, 2000], [2000]]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(PARAMS, st.integers(0, 9)), min_size=2, max_size=6), st.integers(0, 99))
def test_a_row_is_chosen_as_if_alone(rows: list[tuple[SamplingParams, int]], seed: int) -> None:
    logits = random_logits(len(rows), seed, spread=3.0)
    params, positions = [p for p, _ in rows], [n for _, n in rows]
    together = choose(logits.clone(), view_of(params, positions), KERNELS)
    for i, (p, n) in enumerate(rows):
        alone = choose(logits[i : i + 1].clone(), view_of([p], [n]), KERNELS)
        assert alone[0] == together[i]


def test_the_same_seed_gives_the_same_token_in_whichever_row() -> None:
    """And another seed or position gives another, on logits that favour no token."""
    ours = SamplingParams(temperature=1.3, top_p=0.95, seed=-77)
    others = [
        SamplingParams(temperature=0.0, seed=-77),
        SamplingParams(temperature=1.3, top_k=3, seed=5),
        SamplingParams(temperature=1.3, top_p=0.95, seed=-78),
    ]
    logits = random_logits(1, 3, spread=0.01).repeat(8, 1)
    params = [ours, others[0], ours, others[1], ours, others[2], ours, ours]
    chosen = choose(logits, view_of(params, [4] * 7 + [5]), KERNELS).tolist()
    assert chosen[0] == chosen[2] == chosen[4] == chosen[6]
    assert len({chosen[0], chosen[5], chosen[7]}) == 3


def test_at_temperature_zero_the_first_of_the_best_is_chosen() -> None:
    logits = random_logits(2, 0, spread=1.0)
    logits[:, [40, 2999]] = 50.0
    greedy = SamplingParams(temperature=0.0, seed=1, top_k=3, top_p=0.1, min_p=0.9)
    for beside in (greedy, SamplingParams(temperature=1.0, seed=1)):
        view = view_of([greedy, beside], [0, 0])
        assert choose(logits.clone(), view, KERNELS)[0] == 40


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-38, 1e-40, 1e-45, 1e-60])
def test_next_to_temperature_zero_the_choice_is_greedy(temperature: float) -> None:
    """Down to where a float32 is 0: logits divided by so little would be infinite."""
    logits = random_logits(1, 5, spread=9.0)
    for top_k in (0, 5):
        params = SamplingParams(temperature=temperature, top_k=top_k, seed=2)
        chosen = choose(logits.clone(), view_of([params], [3]), KERNELS)
        assert chosen.tolist() == [logits.argmax()]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=6),
        SamplingParams(temperature=1.5, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=["top-k", "top-p", "min-p", "all"],
)
def test_filtered_samples_follow_the_renormalised_law(params: SamplingParams) -> None:
    logits = random_logits(1, 8, spread=1.5)[:, :16]
    scaled = logits[0] / params.temperature
    left = sorted(by_definition(scaled, params).kept)
    assert 3 <= len(left) < 16
    n = 4000
    view = SamplingView(
        positions=torch.arange(n),
        seeds=torch.full((n,), 6),
        temperature=torch.full((n,), params.temperature),
        top_p=torch.full((n,), params.top_p),
        top_k=torch.full((n,), params.top_k),
        min_p=torch.full((n,), params.min_p),
        samples=True,
        filtered=tuple(range(n)),
    )
    chosen = choose(logits.repeat(n, 1), view, KERNELS)
    counts = torch.bincount(chosen, minlength=16)
    assert counts.sum() == counts[left].sum() == n
    expected = scaled[left].softmax(-1) * n
    assert expected.min() > 5
    statistic = ((counts[left] - expected) ** 2 / expected).sum().item()
    freedom = len(left) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
