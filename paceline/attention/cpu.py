"""The kernels for the CPU at hand: compiled loops for everything but long prompt chunks.

Reads K and V from their pages once, for all query heads of a group and all rows of a tile, without
gathering them first. Chunks of more than 64 tokens go through torch's blocked attention, which
multiplies matrices where the loops would multiply vectors. Activations are float32 whatever the
number format of weights and K/V; see `paceline.model.linear` for the GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.attention.base import AttentionView, Geometry, attention_scale
from paceline.attention.compiled import Kernel, float_bits
from paceline.model import noise
from paceline.model.rope import rope_table
from paceline.types import TREE_WIDTH

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class CpuKernels:
    """Implements `Kernels`. Raises `compiled.Unavailable` where the machine cannot."""

    name = "compiled CPU"
    capturable = False

    def __init__(self, config: Geometry, max_length: int, cache_dtype: torch.dtype) -> None:
        # Importing compiles, or loads machine code from disk.
        from paceline.attention import cpu_code as code
        from paceline.attention import cpu_intrinsics, cpu_sampling

        stored = cpu_intrinsics.FLOAT32 if cache_dtype == torch.float32 else cpu_intrinsics.BFLOAT16
        self.config = config
        self.norm, self.silu_mul = Kernel(code.norm), Kernel(code.silu_mul)
        self.rotate_store = Kernel(code.rotate_store_kernel(stored))
        self.attend = Kernel(code.attend_kernel(config.head_dim, stored))
        self.argmax = Kernel(cpu_sampling.argmax)
        self.noise = Kernel(cpu_sampling.noise_of)
        self.cos, self.sin = rope_table(config.rope, config.head_dim, max_length)
        self.eps = float_bits(config.rms_norm_eps)
        self.scale = attention_scale(config)
        self.threads = torch.get_num_threads()

    def begin(self, view: AttentionView) -> CpuStep:
        longest = max(
            (n for n in map(int.__sub__, view.bounds[1:], view.bounds) if n <= TREE_WIDTH),
            default=0,
        )
        return CpuStep(self, view, longest, min(self.threads, view.bounds[-1]))

    def noisy_argmax(
        self, logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        rows, vocab = logits.shape
        noisy = (positions >= 0).long()
        keys = noise.row_keys(seeds, positions)
        out = torch.empty(rows, dtype=torch.int64)
        self.argmax(
            logits.data_ptr(),
            keys.data_ptr(),
            noisy.data_ptr(),
            out.data_ptr(),
            rows,
            vocab,
            threads=min(self.threads, rows),
        )
        return out

    def add_noise(
        self, logits: torch.Tensor, ids: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> None:
        rows, width = logits.shape
        noisy = (positions >= 0).long()
        keys = noise.row_keys(seeds, positions)
        self.noise(
            logits.data_ptr(),
            ids.data_ptr(),
            keys.data_ptr(),
            noisy.data_ptr(),
            rows,
            width,
            threads=min(self.threads, rows),
        )


@dataclass(frozen=True, slots=True)
class CpuStep:
    """Implements `Step`. `longest`: tokens of the longest tile that the compiled loop takes."""

    kernels: CpuKernels
    view: AttentionView
    longest: int
    threads: int

    def add_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(residual)
        self.kernels.norm(
            residual.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *residual.shape,
            self.kernels.eps,
            threads=self.threads,
        )
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        out = torch.empty(len(qkv), self.kernels.config.num_heads * self.kernels.config.head_dim)
        self._store(qkv, out, cache, norms)
        return out

    def store(self, kv: torch.Tensor, cache: torch.Tensor, norm: torch.Tensor | None) -> None:
        self._store(kv, kv.new_empty(0), cache, None if norm is None else (norm, norm))

    def _store(
        self,
        qkv: torch.Tensor,
        out: torch.Tensor,
        cache: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """The heads of q are as many as `out` has room for."""
        c, k = self.kernels.config, self.kernels
        k.rotate_store(
            qkv.data_ptr(),
            out.data_ptr(),
            cache.data_ptr(),
            self.view.positions.data_ptr(),
            self.view.cache_index.data_ptr(),
            k.cos.data_ptr(),
            k.sin.data_ptr(),
            0 if norms is None else norms[0].data_ptr(),
            0 if norms is None else norms[1].data_ptr(),
            len(qkv),
            out.numel() // (len(qkv) * c.head_dim),
            c.num_kv_heads,
            cache.shape[3],
            len(k.cos),
            cache.numel(),
            k.eps,
            c.head_dim,
            threads=self.threads,
        )

    def attend(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        c, k, view = self.kernels.config, self.kernels, self.view
        out = torch.empty_like(q)
        if self.longest:
            k.attend(
                q.data_ptr(),
                out.data_ptr(),
                cache.data_ptr(),
                view.tile_starts.data_ptr(),
                view.contexts.data_ptr(),
                view.pages.data_ptr(),
                view.ancestors.data_ptr(),
                len(view.bounds) - 1,
                len(q),
                c.num_heads,
                c.num_kv_heads,
                cache.shape[3],
                view.pages.shape[1],
                cache.numel(),
                float_bits(k.scale),
                self.longest,
                view.tails.data_ptr(),
                view.hidden,
                threads=k.threads,
            )
        for tile in range(len(view.bounds) - 1):
            if view.bounds[tile + 1] - view.bounds[tile] > TREE_WIDTH:
                self._attend_chunk(tile, q, cache, out)
        return out

    def _attend_chunk(
        self, tile: int, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """A prompt's chunk: all of the context unmasked, the chunk itself causal, then merged."""
        c, lo, hi = self.kernels.config, self.view.bounds[tile], self.view.bounds[tile + 1]
        context, rows, group = int(self.view.contexts[tile]), hi - lo, c.num_heads // c.num_kv_heads
        page_size = cache.shape[3]
        pages = self.view.pages[tile, : -(-(context + rows) // page_size)]
        kv = torch.empty(2, c.num_kv_heads, len(pages), page_size, c.head_dim)
        kv.copy_(cache.index_select(0, pages).permute(1, 2, 0, 3, 4))
        # One batch entry per query head of a group, all sharing K and V: (group, kv_heads, n, D).
        k, v = kv.flatten(2, 3)[:, None].expand(-1, group, -1, -1, -1)
        heads = q[lo:hi].view(rows, c.num_kv_heads, group, c.head_dim).permute(2, 1, 0, 3)
        own = slice(context, context + rows)
        mixed, weight = _flash(
            heads, k[:, :, own], v[:, :, own], 0.0, True, scale=self.kernels.scale
        )
        seen = slice(self.view.hidden, context)
        if context > seen.start:
            past, past_weight = _flash(
                heads, k[:, :, seen], v[:, :, seen], 0.0, False, scale=self.kernels.scale
            )
            share = torch.sigmoid(past_weight - weight)[..., None]
            mixed = torch.lerp(mixed, past, share)
        out[lo:hi] = mixed.permute(2, 1, 0, 3).reshape(rows, -1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, double = gate_up.shape
        out = torch.empty(rows, double // 2)
        self.kernels.silu_mul(
            gate_up.data_ptr(), out.data_ptr(), rows, double // 2, threads=self.threads
        )
        return out
