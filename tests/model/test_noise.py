"""Is the keyed noise what sampling needs: uniform, independent, exact, and always the same?"""

from __future__ import annotations

import math

import pytest
import torch

from paceline.attention.base import Kernels
from paceline.attention.reference import ReferenceKernels
from paceline.model import noise
from paceline.model.config import ModelConfig
from tests.model.support import LENGTH, compiled_kernels

IDS = torch.arange(49152, dtype=torch.int32)


def keys(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return noise.row_keys(torch.tensor(seeds), torch.tensor(positions))


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Deviations of the statistic from its mean, in standard deviations (about normal)."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (0, 1), (-(2**63), 5), (2**62, 9)])
def test_uniform_over_ids(seed: int, position: int) -> None:
    u = noise.uniform(keys([seed], [position]), IDS)[0]
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u, bins=256, min=0, max=1)
    assert abs(chi_square(counts, torch.full((256,), len(IDS) / 256))) < 4


def test_uniform_over_positions_and_over_seeds() -> None:
    many = list(range(20_000))
    for k in (keys([3] * len(many), many), keys(many, [3] * len(many))):
        for token in (0, 1, 777):
            u = noise.uniform(k, torch.tensor([token], dtype=torch.int32))[:, 0]
            counts = torch.histc(u, bins=128, min=0, max=1)
            assert abs(chi_square(counts, torch.full((128,), len(many) / 128))) < 4


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation times sqrt(n): about a standard normal when independent."""
    a, b = a.double() - a.mean(), b.double() - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm()) * math.sqrt(len(a)))


def test_neighbours_are_independent() -> None:
    pairs = [((5, 10), (5, 11)), ((5, 10), (6, 10)), ((5, 10), (5, 10 + 2**32)), ((0, 1), (1, 0))]
    for one, other in pairs:
        a, b = noise.uniform(keys(*map(list, zip(one, other, strict=True))), IDS)  # type: ignore[arg-type]
        assert not torch.equal(a, b)
        for shift in (0, 1, 2, 64):
            assert abs(correlation(a[: len(a) - shift], b[shift:])) < 4
        low = [(x * 2**23).long() & 1 for x in (a, b)]
        assert abs(correlation(low[0].float(), low[1].float())) < 4
    u = noise.uniform(keys([5], [10]), IDS)[0]
    for shift in (1, 2, 3, 16, 4096):
        assert abs(correlation(u[:-shift], u[shift:])) < 4


def test_every_seed_and_position_has_its_own_key() -> None:
    seeds = torch.arange(-200, 200).repeat_interleave(400)
    positions = torch.arange(400).repeat(400)
    assert len(noise.row_keys(seeds, positions).unique()) == 400 * 400


def test_the_logarithm_is_accurate() -> None:
    x = torch.cat([torch.rand(100_000), torch.rand(1000) * 1e6, 2.0 ** -torch.arange(1.0, 25.0)])
    exact = x.double().log()
    error = (noise.log(x.clone()) - exact).abs()
    assert (error <= 2e-7 * exact.abs().clamp(min=1e-3) + 6e-8).all()


def test_gumbel_has_its_mean_and_variance() -> None:
    g = noise.gumbel(keys(list(range(20)), [7] * 20), IDS).double()
    assert abs(g.mean().item() - 0.5772157) < 5 * 1.2825 / math.sqrt(g.numel())
    assert abs(g.var().item() / (math.pi**2 / 6) - 1) < 0.01


def test_golden_values() -> None:
    """The generator never changes by accident: a text's seed is a promise."""
    u = noise.uniform(keys([0, 42, -1], [0, 7, 123456]), torch.tensor([0, 1, 49151]).int())
    assert (u * 2**24).long().tolist() == GOLDEN


GOLDEN = [
    [16060669, 5316121, 16766313],
    [3590751, 9203031, 7905325],
    [16371409, 13459511, 13515443],
]


def law_kernels() -> list[Kernels]:
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=12, hidden_size=32, intermediate_size=32,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32, rms_norm_eps=1e-5, max_position=8,
    )  # fmt: skip
    return [
        ReferenceKernels(config, LENGTH, torch.device("cpu")),
        compiled_kernels(config, torch.float32),
    ]


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_five_thousand_samples_follow_softmax(over: str) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(12, generator=generator) * 1.2
    many, fixed = torch.arange(5000), torch.full((5000,), 11)
    seeds, positions = (fixed, many) if over == "positions" else (many, fixed)
    expected = logits.softmax(-1) * 5000
    assert expected.min() > 5
    for kernels in law_kernels():
        chosen = kernels.noisy_argmax(logits.repeat(5000, 1), seeds, positions)
        counts = torch.bincount(chosen, minlength=12).float()
        assert abs(chi_square(counts, expected)) < 4
