"""The kernels in plain torch: the oracle for every other implementation, and the way out where no
compiled kernels exist. Runs on any device and number format; written to be read, not to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from paceline.attention.base import AttentionView, Geometry
from paceline.model import noise
from paceline.model.rope import rope_table
from paceline.types import TREE_WIDTH


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, statistics in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


class ReferenceKernels:
    """Implements `Kernels`."""

    name = "torch"
    capturable = False

    def __init__(self, config: Geometry, max_length: int, device: torch.device) -> None:
        self.config = config
        cos, sin = rope_table(config.rope, config.head_dim, max_length)
        self.cos, self.sin = cos.to(device), sin.to(device)
        self.ids = torch.arange(config.vocab_size, dtype=torch.int32, device=device)

    def begin(self, view: AttentionView) -> ReferenceStep:
        return ReferenceStep(self, view)

    def noisy_argmax(
        self, logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        logits = logits.clone()
        self.add_noise(logits, self.ids[: logits.shape[1]], seeds, positions)
        return logits.argmax(-1)

    def add_noise(
        self, logits: torch.Tensor, ids: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> None:
        keys = noise.row_keys(seeds, positions.clamp(min=0))
        logits += noise.gumbel(keys, ids).mul_((positions >= 0)[:, None])


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """Implements `Step`."""

    kernels: ReferenceKernels
    view: AttentionView

    def add_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        if delta is not None:
            residual.add_(delta)
        return rms_norm(residual, weight, self.kernels.config.rms_norm_eps)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        c = self.kernels.config
        q, kv = torch.split(qkv, [c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim], dim=1)
        self.store(kv, cache, None if norms is None else norms[1])
        heads = q.reshape(len(q), c.num_heads, c.head_dim)
        if norms is not None:
            heads = rms_norm(heads, norms[0], c.rms_norm_eps)
        return self._rotate(heads).flatten(1)

    def store(self, kv: torch.Tensor, cache: torch.Tensor, norm: torch.Tensor | None) -> None:
        c = self.kernels.config
        k, v = kv.reshape(len(kv), 2, c.num_kv_heads, c.head_dim).unbind(1)
        if norm is not None:
            k = rms_norm(k, norm, c.rms_norm_eps)
        page_size = cache.shape[3]
        page = self.view.cache_index // page_size
        offset = self.view.cache_index % page_size
        cache[page, 0, :, offset] = self._rotate(k).to(cache.dtype)
        cache[page, 1, :, offset] = v.to(cache.dtype)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:  # (T, heads, head_dim)
        cos = self.kernels.cos[self.view.positions][:, None]  # (T, 1, head_dim / 2)
        sin = self.kernels.sin[self.view.positions][:, None]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def attend(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        c = self.kernels.config
        out = torch.empty_like(q)
        heads = q.view(len(q), c.num_heads, c.head_dim)
        bounds = self.view.bounds
        for tile in range(len(bounds) - 1):
            lo, hi = bounds[tile], bounds[tile + 1]
            keys, values, visible = self._tile(tile, hi - lo, cache)
            mixed = functional.scaled_dot_product_attention(
                heads[lo:hi].transpose(0, 1).float(),  # (heads, rows, head_dim)
                keys.repeat_interleave(c.num_heads // c.num_kv_heads, dim=0),
                values.repeat_interleave(c.num_heads // c.num_kv_heads, dim=0),
                attn_mask=visible,
            )
            out[lo:hi] = mixed.transpose(0, 1).flatten(1).to(q.dtype)
        return out

    def _tile(
        self, tile: int, rows: int, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V of one tile's request, (kv_heads, length, head_dim), and who sees what."""
        context = int(self.view.contexts[tile])
        length = context + int(self.view.tails[tile])
        index = torch.arange(length, device=cache.device)
        page = self.view.pages[tile].long()[index // cache.shape[3]]
        keys, values = cache[page, :, :, index % cache.shape[3]].float().permute(1, 2, 0, 3)
        row = torch.arange(rows, device=cache.device)[:, None]
        trailing = index[None, :] - context
        lo = self.view.bounds[tile]
        if rows > TREE_WIDTH:
            return keys, values, (trailing <= row) & (index >= self.view.hidden)
        bits = self.view.ancestors[lo : lo + rows, None] >> trailing.clamp(min=0)
        seen = (trailing < 0) | ((bits & 1) == 1)
        return keys, values, seen & (index >= self.view.hidden)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
