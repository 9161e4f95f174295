"""Is the keyed noise what sampling needs: uniform, independent, exact, and always the same?

Statistics are in standard deviations and their keys are fixed: a bound of 4 or 5 is met or it is
not, today as ever.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.attention.base import Kernels
from paceline.attention.reference import ReferenceKernels
from paceline.model import noise
from paceline.model.config import ModelConfig
from tests.model.support import LENGTH, compiled_kernels

IDS = torch.arange(49152, dtype=torch.int32)
INT64 = st.integers(-(2**63), 2**63 - 1)


def keys(*rows: tuple[int, int]) -> torch.Tensor:
    """Keys of (seed, position) pairs."""
    seeds, positions = zip(*rows, strict=True)
    return noise.row_keys(torch.tensor(seeds), torch.tensor(positions))


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Deviation of the statistic from its mean, in standard deviations (about normal)."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation times sqrt(n): about a standard normal when independent."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).sum() / (a.norm() * b.norm()) * math.sqrt(len(a)))


def assert_uniform(u: torch.Tensor) -> None:
    """Chi-square over bins, and Kolmogorov-Smirnov (1.95 is exceeded once in 1,000)."""
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u, bins=128, min=0, max=1)
    assert abs(chi_square(counts, torch.full((128,), len(u) / 128))) < 4
    steps = torch.arange(len(u) + 1, dtype=torch.float64) / len(u)
    ranked = u.double().sort().values
    distance = torch.maximum(steps[1:] - ranked, ranked - steps[:-1]).max().item()
    assert distance * math.sqrt(len(u)) < 1.95


def assert_independent(a: torch.Tensor, b: torch.Tensor) -> None:
    """Two rows of uniform numbers: as numbers, and bit by bit (highest, middle and lowest)."""
    assert not torch.equal(a, b)
    assert abs(correlation(a, b)) < 4
    for bit in (0, 1, 11, 21, 22):
        x, y = (((u * 2.0**23).long() >> bit) & 1 for u in (a, b))
        assert abs(correlation(x, y)) < 4


# --- exactness ---------------------------------------------------------------------------------


def plain_key(seed: int, position: int) -> int:
    """The row key in unbounded integers."""
    x, mask = seed % 2**64, 2**64 - 1
    for word in (0, position):
        x = (x + (word + 1) * noise.SPLIT_GAMMA) & mask
        x = ((x ^ (x >> 30)) * noise.SPLIT_A) & mask
        x = ((x ^ (x >> 27)) * noise.SPLIT_B) & mask
        x ^= x >> 31
    return x


def plain_bits(key: int, token: int) -> int:
    """The 23 bits of a uniform number in unbounded integers."""
    low, high, mask = key & (2**32 - 1), key >> 32, 2**32 - 1
    x = ((token * noise.GOLDEN) & mask) ^ low
    x = ((x ^ (x >> 16)) * noise.MULTIPLY_A) & mask
    x = (((x ^ (x >> 15)) + high) * noise.MULTIPLY_B) & mask
    x = ((x ^ (x >> 16)) * noise.MULTIPLY_A) & mask
    return (x ^ (x >> 15)) >> 9


@settings(deadline=None, max_examples=200)
@given(INT64, st.integers(0, 2**40), st.integers(0, 2**31 - 1))
def test_bits_equal_those_of_unbounded_integers(seed: int, position: int, token: int) -> None:
    key = plain_key(seed, position)
    assert keys((seed, position)).item() % 2**64 == key
    u = noise.uniform(keys((seed, position)), ids(token)).item()
    assert u == (plain_bits(key, token) + 0.5) / 2**23


def test_golden_values() -> None:
    """The generator never changes by accident: a text's seed is a promise."""
    rows = keys((0, 0), (42, 7), (-1, 123456), (-(2**63), 1), (2**63 - 1, 2**31))
    some = ids(0, 1, 49151, 2**31 - 1)
    assert rows.tolist() == GOLDEN_KEYS
    assert (noise.uniform(rows, some) * 2**24).long().tolist() == GOLDEN_UNIFORM
    assert noise.gumbel(rows, some).view(torch.int32).tolist() == GOLDEN_GUMBEL


GOLDEN_KEYS = [
    -6411193824288604561,
    -4893543810735773810,
    5948775738924339003,
    6636771913028173382,
    -5726879898955216759,
]
GOLDEN_UNIFORM = [
    [16060669, 5316121, 16766313, 9482639],
    [12201877, 4474747, 5510067, 5981365],
    [908283, 9457753, 6386385, 13506589],
    [15009913, 5311135, 1768665, 15154655],
    [8882741, 16116833, 15193535, 10305501],
]
GOLDEN_GUMBEL = [
    [1078488050, -1106347749, 1089131594, 1057990341],
    [1066564082, -1097940546, -1109650589, -1124266237],
    [-1081540808, 1057913248, 1024347881, 1069787236],
    [1074561508, -1106292982, -1085304011, 1074939675],
    [1055377340, 1078837675, 1075046687, 1060635214],
]


@pytest.mark.parametrize("apart", [1, 2, 1000])
def test_no_seed_is_another_shifted(apart: int) -> None:
    """A seed further by a multiple of the mixer's own increment must not repeat earlier noise."""
    far = (5 + apart * noise.SPLIT_GAMMA + 2**63) % 2**64 - 2**63
    assert not set(keys(*((5, p) for p in range(2000))).tolist()) & set(
        keys(*((far, p) for p in range(2000))).tolist()
    )


def every_kind_of_uniform() -> torch.Tensor:
    """Values that `uniform` can return: both ends whole, every 61st between."""
    bits = torch.cat(
        [torch.arange(2**15), torch.arange(2**15, 2**23, 61), torch.arange(2**23 - 2**15, 2**23)]
    )
    return (bits.float() + 0.5) * 2.0**-23


def test_the_logarithm_is_accurate() -> None:
    wide = torch.cat([torch.rand(50_000) * 1e6, 2.0 ** torch.arange(-125.0, 127.0)])
    for x in (every_kind_of_uniform(), wide):
        exact = x.double().log()
        error = (noise.log(x.clone()) - exact).abs()
        assert (error <= 1.5e-7 * exact.abs()).all()


def test_gumbel_noise_is_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    u = every_kind_of_uniform()
    exact = -(-u.double().log()).log()
    monkeypatch.setattr(noise, "uniform", lambda keys, ids: u.clone())
    got = noise.gumbel(torch.empty(0), torch.empty(0))
    assert ((got - exact).abs() <= 1.5e-7 * exact.abs() + 1.5e-7).all()
    assert -2.812 < got.min() < -2.81 and 16.63 < got.max() < 16.64


# --- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "position"),
    [(0, 0), (1, 0), (0, 1), (-1, 0), (-(2**63), 5), (2**63 - 1, 5), (2**62, 131072)],
)
def test_uniform_over_ids(seed: int, position: int) -> None:
    assert_uniform(noise.uniform(keys((seed, position)), IDS)[0])


@pytest.mark.parametrize("token", [0, 1, 777, 151935])
def test_uniform_over_positions_and_over_seeds(token: int) -> None:
    many = range(20_000)
    for rows in (keys(*((3, n) for n in many)), keys(*((n - 10_000, 3) for n in many))):
        assert_uniform(noise.uniform(rows, ids(token))[:, 0])


@pytest.mark.parametrize(
    "other",
    [(5, 11), (5, 9), (6, 10), (4, 10), (10, 5), (-5, 10), (5, 10 + 2**32), (5 + 2**32, 10)],
)
def test_neighbouring_rows_are_independent(other: tuple[int, int]) -> None:
    a, b = noise.uniform(keys((5, 10), other), IDS)
    assert_independent(a, b)
    for shift in (1, 2, 64):
        assert abs(correlation(a[:-shift], b[shift:])) < 4
        assert abs(correlation(a[shift:], b[:-shift])) < 4


@pytest.mark.parametrize("shift", [1, 2, 3, 16, 4096])
def test_neighbouring_ids_are_independent(shift: int) -> None:
    u = noise.uniform(keys((5, 10)), IDS)[0]
    assert_independent(u[:-shift], u[shift:])


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_one_id_is_independent_from_row_to_row(over: str) -> None:
    rows = keys(*((9, n) if over == "positions" else (n, 9) for n in range(20_001)))
    u = noise.uniform(rows, ids(0, 1))
    assert_independent(u[:-1, 0], u[1:, 0])
    assert_independent(u[:-1, 0], u[1:, 1])


def test_no_two_rows_are_equal() -> None:
    seeds = torch.arange(-200, 200).repeat_interleave(400)
    rows = noise.row_keys(seeds, torch.arange(400).repeat(400))
    assert len(rows.unique()) == 400 * 400
    bits = (noise.uniform(rows, ids(0, 1)) * 2.0**23).long()
    assert len((bits[:, 0] * 2**23 + bits[:, 1]).unique()) == 400 * 400


def test_gumbel_has_its_mean_and_variance() -> None:
    g = noise.gumbel(keys(*((seed, 7) for seed in range(-10, 10))), IDS).double()
    assert abs(g.mean().item() - 0.5772157) < 4 * 1.2825 / math.sqrt(g.numel())
    assert abs(g.var().item() / (math.pi**2 / 6) - 1) < 0.01


# --- the law of what is chosen -----------------------------------------------------------------


def law_kernels(kind: str) -> Kernels:
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=12, hidden_size=32, intermediate_size=32,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32, rms_norm_eps=1e-5, max_position=8,
    )  # fmt: skip
    if kind == "compiled":
        return compiled_kernels(config, torch.float32)
    return ReferenceKernels(config, LENGTH, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["compiled", "reference"])
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_five_thousand_samples_follow_softmax(over: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(12, generator=generator) * 1.2
    many, fixed = torch.arange(5000), torch.full((5000,), 11)
    seeds, positions = (fixed, many) if over == "positions" else (many, fixed)
    expected = logits.softmax(-1) * 5000
    assert expected.min() > 5
    chosen = law_kernels(kind).noisy_argmax(logits.repeat(5000, 1), seeds, positions)
    counts = torch.bincount(chosen, minlength=12).float()
    assert abs(chi_square(counts, expected)) < 4
    following = torch.bincount(chosen[:-1] * 12 + chosen[1:], minlength=144).float()
    law = torch.outer(expected, expected).flatten() / 5000  # of two neighbours, independent
    common = law > 5
    rest = torch.stack([following[~common].sum(), law[~common].sum()])
    observed = torch.cat([following[common], rest[:1]])
    assert abs(chi_square(observed, torch.cat([law[common], rest[1:]]))) < 4
