"""The one interface between the model and whatever does its arithmetic outside the weight GEMMs.

A `Kernels` is made once per model and device; `begin(view)` binds it to one step and gives a `Step`
that the model calls layer by layer. Implementations: `reference` (plain torch, any device, the
oracle), `cpu` (compiled for the CPU at hand); a GPU one goes beside them. They know tensors and
page tables, nothing of requests, drafters or policies.

Rows and tiles. The T tokens of a step are cut into tiles: consecutive tokens of one request. A
token of a tile sees every position below the tile's `context` plus those trailing positions whose
bit is set in its 64-bit ancestor mask (bit j: position `context + j`; a token is its own ancestor).
A chain, a tree and a prompt's chunk differ in the masks only. A tile longer than 64 tokens must be
causal: its masks are not read. Mostly the tile is the whole tail, token i at position
`context + i`; a drafter that grows a tree level by level has earlier levels in the tail that are
not in the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.model.config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How K and V lie in memory: one tensor a layer, (pages, 2, kv_heads, page_size, head_dim)."""

    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def allocate(self, device: torch.device) -> torch.Tensor:
        """One layer's storage, not initialised: nothing reads a position before it is written."""
        shape = (self.pages, 2, self.kv_heads, self.page_size, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=device)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return 2 * self.kv_heads * self.page_size * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionView:
    """What the kernels need of a step. T tokens in R tiles.

    positions: (T,) int64, place of each token in its request's text.
    cache_index: (T,) int64, page * page_size + offset where each token's K/V goes.
    ancestors: (T,) int64, bit masks as described above.
    tile_starts: (R + 1,) int32 on the host side of the step too (`bounds`), token offsets.
    contexts: (R,) int32, committed positions before each tile.
    pages: (R, max_pages) int32, page table of each tile's request.
    bounds: the same tile starts as plain ints; empty where only the device knows them (graphs).
    tails: (R,) int32, positions from `contexts` on that the tile's masks speak of.
    hidden: leading positions of every request that nobody sees; no more than its context.
    """

    positions: torch.Tensor
    cache_index: torch.Tensor
    ancestors: torch.Tensor
    tile_starts: torch.Tensor
    contexts: torch.Tensor
    pages: torch.Tensor
    bounds: tuple[int, ...]
    tails: torch.Tensor
    hidden: int = 0


class Geometry(Protocol):
    """What the kernels need to know of a model: a `ModelConfig`, or a drafter's."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope(self) -> RopeConfig: ...


class Step(Protocol):
    """The kernels bound to one step. All activations are (T, width), contiguous."""

    def add_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """residual += delta in place (where there is one); returns RMSNorm(residual) * weight."""
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Norm (where there is one) and rotate q and k, write k and v into `cache`, return q.

        qkv: (T, (heads + 2 kv_heads) * head_dim). Returns (T, heads * head_dim).
        """
        ...

    def store(self, kv: torch.Tensor, cache: torch.Tensor, norm: torch.Tensor | None) -> None:
        """As `rotate_and_store` without q: kv is (T, 2 kv_heads * head_dim)."""
        ...

    def attend(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Attention of every token over what it may see: (T, heads * head_dim)."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half: (T, 2 * width) -> (T, width)."""
        ...


class Kernels(Protocol):
    """Arithmetic for one model on one device."""

    @property
    def name(self) -> str:
        """For logs: which kernels these are."""
        ...

    @property
    def capturable(self) -> bool:
        """Can a step of views without `bounds` be captured in a CUDA graph?"""
        ...

    def begin(self, view: AttentionView) -> Step: ...

    def noisy_argmax(
        self, logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """argmax(logits + Gumbel noise) by row; rows with `positions` < 0 get no noise.

        logits: (S, vocab) float32; seeds, positions: (S,) int64. Returns (S,) int64.
        Noise as in `paceline.model.noise`, bit for bit.
        """
        ...

    def add_noise(
        self, logits: torch.Tensor, ids: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Add the noise of the token ids that the columns stand for, in place.

        logits: (S, n) float32; ids: (n,) int32; seeds, positions: (S,) int64, as above.
        """
        ...


def attention_scale(config: Geometry) -> float:
    return float(config.head_dim**-0.5)
