"""Rotary position embedding: tables of cos and sin for every kind of scaling the checkpoints use.

Half-rotation form: element i of the first half of a head pairs with element i of the second half.
Sources: Su et al. (arXiv 2104.09864); Llama-3 scaling as in Hugging Face's `rope_type: "llama3"`;
YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math

import torch

from paceline.model.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (length, head_dim / 2) float32, attention factor included."""
    inverse, factor = _frequencies(rope, head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse[None, :]
    return angles.cos() * factor, angles.sin() * factor


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, the band between is blended."""
    wavelengths = 2 * math.pi / plain
    rotations = rope.original_max_position / wavelengths
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    """Fast dimensions keep their frequency, slow ones are interpolated, a ramp lies between."""

    def dimension(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain * (1 - ramp) + plain / rope.factor * ramp, _yarn_factor(rope)


def _yarn_factor(rope: RopeConfig) -> float:
    def grow(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return grow(rope.mscale) / grow(rope.mscale_all_dim)
    return grow(1.0)
