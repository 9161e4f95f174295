"""The choice of a token against a plain, slow reading of its definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.attention.reference import ReferenceKernels
from paceline.model import noise
from paceline.model.config import ModelConfig
from paceline.model.sampling import HEAD, SamplingView, choose, filter_rows
from paceline.types import SamplingParams

VOCAB = 3000
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


def kept(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Ids that the filters leave, by the definition, token by token in float64."""
    order = logits.argsort(descending=True, stable=True).tolist()
    if params.top_k:
        order = order[: params.top_k]
    p = logits.double()[order].softmax(-1).tolist()
    left, mass = [], 0.0
    for token, probability in zip(order, p, strict=True):
        if left and (mass >= params.top_p or probability < params.min_p * p[0]):
            break
        left.append(token)
        mass += probability
    return set(left)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 2000, VOCAB + 7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 10**6), st.floats(0.01, 8))
def test_filters_keep_what_their_definition_keeps(
    params: list[SamplingParams], seed: int, spread: float
) -> None:
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    view = view_of(params, [0] * len(params))
    got = logits.clone()
    if view.filtered:
        filter_rows(got, view)
    for i, p in enumerate(params):
        if i not in view.filtered:
            assert torch.equal(got[i], logits[i])
            continue
        found = set((got[i] > -torch.inf).nonzero()[:, 0].tolist())
        wanted = kept(logits[i], p)
        edge = found ^ wanted  # rounding of the running mass may move the edge by a token or two
        assert len(edge) <= 2 + len(wanted) // 500
        assert torch.equal(got[i][sorted(found)], logits[i][sorted(found)])
        assert logits[i].argmax().item() in found


def test_a_flat_nucleus_wider_than_the_ranked_head_is_found() -> None:
    logits = torch.zeros(1, VOCAB)
    logits += torch.linspace(0, 0.01, VOCAB)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    filter_rows(logits, view_of([params], [0]))
    left = int((logits > -torch.inf).sum())
    assert left > HEAD and abs(left - 0.9 * VOCAB) < 20


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(PARAMS, st.integers(0, 9)), min_size=2, max_size=6), st.randoms())
def test_a_row_is_chosen_as_if_alone(rows: list[tuple[SamplingParams, int]], rng) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(len(rows))
    logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
    rng.shuffle(rows)
    params, positions = [p for p, _ in rows], [n for _, n in rows]
    together = choose(logits.clone(), view_of(params, positions), KERNELS)
    for i, (p, n) in enumerate(rows):
        alone = choose(logits[i : i + 1].clone(), view_of([p], [n]), KERNELS)
        assert alone[0] == together[i]


def test_the_rule_is_argmax_of_processed_logits_plus_noise() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=t, seed=8) for t in (0.0, 0.7, 1.5)]
    chosen = choose(logits.clone(), view_of(params, [4, 4, 4]), KERNELS)
    key = noise.row_keys(torch.tensor([8]), torch.tensor([4]))
    g = noise.gumbel(key, torch.arange(VOCAB, dtype=torch.int32))[0]
    assert chosen.tolist() == [
        logits[0].argmax(),
        (logits[1] / 0.7 + g).argmax(),
        (logits[2] / 1.5 + g).argmax(),
    ]
