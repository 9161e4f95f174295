"""One sequence through a model without an engine: views by hand, pages in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from paceline.attention.base import AttentionView, Kernels, KVLayout
from paceline.attention.compiled import Unavailable
from paceline.model.config import ModelConfig
from paceline.model.llama import LlamaModel
from paceline.types import TREE_WIDTH

LENGTH = 512


@functools.cache
def compiled_kernels(config: ModelConfig, dtype: torch.dtype) -> Kernels:
    try:
        from paceline.attention.cpu import CpuKernels

        return CpuKernels(config, LENGTH, dtype)
    except (Unavailable, ImportError) as error:
        pytest.skip(f"no compiled kernels here: {error}")


def chunk_view(start: int, count: int, pages: int) -> AttentionView:
    """`count` tokens of one request after `start` committed ones."""
    positions = torch.arange(start, start + count)
    masks = [(2 << i) - 1 if i < 63 else -1 for i in range(count)]
    return AttentionView(
        positions=positions,
        cache_index=positions,
        ancestors=torch.tensor(masks if count <= TREE_WIDTH else [0] * count),
        tile_starts=torch.tensor([0, count], dtype=torch.int32),
        contexts=torch.tensor([start], dtype=torch.int32),
        pages=torch.arange(pages, dtype=torch.int32)[None],
        bounds=(0, count),
        tails=torch.tensor([count], dtype=torch.int32),
    )


@torch.inference_mode()
def run_alone(
    model: LlamaModel, kernels: Kernels, chunks: Sequence[list[int]], layout: KVLayout
) -> list[torch.Tensor]:
    """Logits of each chunk of one text, in turn: (tokens, vocab) each."""
    caches = [layout.allocate(torch.device("cpu")) for _ in model.layers]
    start, out = 0, []
    for ids in chunks:
        step = kernels.begin(chunk_view(start, len(ids), layout.pages))
        hidden, _ = model.forward(torch.tensor(ids), step, caches)
        out.append(model.logits(hidden, step))
        start += len(ids)
    return out
