"""Keyed Gumbel noise: G(seed, position, token id), the same bits on every device.

Counter-based: a value depends on its key alone, never on what was drawn before, so any step may
compute any of it. Only integer operations and correctly rounded float32 additions, subtractions,
multiplications are used (no library logarithm), in a fixed order, so the torch form below, the
compiled CPU form and a GPU kernel without fused multiply-add agree bit for bit.

    key(seed, position) -> two 32-bit words, well mixed, once per row
    u(id)  = (23 bits of mix(id, key) + 1/2) / 2^23      in (0, 1)
    G(id)  = -log(-log(u))                               in about (-2.81, 16.64)

The mixer is a multiply-xorshift permutation of 32 bits with the key entering twice.
"""

from __future__ import annotations

import torch

# Multipliers of the two-round 32-bit mixer (odd, found by avalanche search; public domain
# "lowbias32" by C. Wellons) and the golden-ratio increment that separates neighbouring ids.
MULTIPLY_A = 0x7FEB352D
MULTIPLY_B = 0x846CA68B
GOLDEN = 0x9E3779B9
SPLIT_A = 0xBF58476D1CE4E5B9  # SplitMix64 finaliser, for the row key
SPLIT_B = 0x94D049BB133111EB
SPLIT_GAMMA = 0x9E3779B97F4A7C15

# log(1 + f) = f - f^2/2 + f^3 * P(f) for sqrt(1/2) <= 1 + f < sqrt(2): coefficients of P, highest
# power first (Cephes logf), and ln 2 in two parts.
LOG_POLYNOMIAL = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
SQRT_HALF_BITS = 0x3F3504F3  # sqrt(1/2) as float32 bits


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift_right(x: torch.Tensor, by: int, bits: int) -> torch.Tensor:
    """Logical right shift of a signed tensor."""
    return (x >> by) & ((1 << (bits - by)) - 1)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One 64-bit key per row. seeds, positions: (S,) int64. Returns (S,) int64.

    The seed is mixed before the position is added, so that no seed's noise is another's shifted.
    """
    return _split_mix(_split_mix(seeds) + positions * _signed(SPLIT_GAMMA, 64))


def _split_mix(x: torch.Tensor) -> torch.Tensor:
    """The next number of SplitMix64 from state `x`: a permutation of 64 bits."""
    x = x + _signed(SPLIT_GAMMA, 64)
    x = (x ^ _shift_right(x, 30, 64)) * _signed(SPLIT_A, 64)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(SPLIT_B, 64)
    return x ^ _shift_right(x, 31, 64)


def uniform(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1). keys: (S,) int64, ids: (N,) int32. Returns (S, N) float32."""
    low = keys.to(torch.int32)[:, None]  # wraps to the low word
    high = (keys >> 32).to(torch.int32)[:, None]
    x = (ids * _signed(GOLDEN, 32))[None, :] ^ low
    x = (x ^ _shift_right(x, 16, 32)) * _signed(MULTIPLY_A, 32)
    x = ((x ^ _shift_right(x, 15, 32)) + high) * _signed(MULTIPLY_B, 32)
    x = (x ^ _shift_right(x, 16, 32)) * _signed(MULTIPLY_A, 32)
    bits = _shift_right(x ^ _shift_right(x, 15, 32), 9, 32)
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive, normal float32, from basic operations only."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    e = exponent.to(torch.float32)
    z = f * f
    p = torch.full_like(f, LOG_POLYNOMIAL[0])
    for coefficient in LOG_POLYNOMIAL[1:]:
        p = p.mul_(f).add_(coefficient)
    y = p.mul_(f).mul_(z).add_(e * LN2_LOW).sub_(z.mul_(0.5))
    return y.add_(f).add_(e.mul_(LN2_HIGH))


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise. keys: (S,) int64, ids: (N,) int32. Returns (S, N) float32."""
    return log(log(uniform(keys, ids)).neg_()).neg_()
