"""The target's pass over a ragged batch: launch by launch, or as a CUDA graph.

A graph is captured for each of a few numbers of tokens, and a batch takes the next larger one. What
the tokens are there for makes no difference: plain decoding, chains, trees and chunks of prompts of
equal number replay the same graph. Spare tokens belong to no tile; their K/V goes to a page of
nobody. All graphs read the same buffers and leave their results in the same ones, so a step copies
its batch in, replays, and must have used the results before the next step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from paceline.attention.base import AttentionView, Kernels, Step
from paceline.exec.batch import RaggedBatch
from paceline.model.llama import LlamaModel

SIZES = (
    1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256,
    320, 384, 448, 512,
)  # fmt: skip


class TargetPass(Protocol):
    """Runs the target. Results are valid until the next call. name: by which profiles are kept."""

    @property
    def name(self) -> str: ...

    def __call__(self, batch: RaggedBatch, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and the features of every token: (T, hidden), (T, features)."""
        ...


@dataclass(frozen=True, slots=True)
class EagerPass:
    """Launch by launch. boundaries: where features are taken, see `LlamaModel.forward`."""

    model: LlamaModel
    caches: Sequence[torch.Tensor]
    boundaries: Sequence[int] = ()
    name: ClassVar[str] = "no graphs"

    def __call__(self, batch: RaggedBatch, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.forward(batch.tokens, step, self.caches, self.boundaries)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What graphs read, for at most T tokens in as many tiles. spare: cache position of nobody."""

    tokens: torch.Tensor
    view: AttentionView
    spare: int

    @classmethod
    def allocate(cls, tokens: int, pages: int, spare: int, device: torch.device) -> _Buffers:
        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        view = AttentionView(
            positions=zeros(torch.int64, tokens),
            cache_index=torch.full((tokens,), spare, dtype=torch.int64, device=device),
            ancestors=zeros(torch.int64, tokens),
            tile_starts=zeros(torch.int32, tokens + 1),
            contexts=zeros(torch.int32, tokens),
            pages=zeros(torch.int32, tokens, pages),
            bounds=(),
            tails=zeros(torch.int32, tokens),
        )
        return cls(zeros(torch.int64, tokens), view, spare)

    def first(self, tokens: int) -> tuple[torch.Tensor, AttentionView]:
        """The part that a graph of so many tokens reads."""
        v = self.view
        view = dataclasses.replace(
            v,
            positions=v.positions[:tokens],
            cache_index=v.cache_index[:tokens],
            ancestors=v.ancestors[:tokens],
            tile_starts=v.tile_starts[: tokens + 1],
            contexts=v.contexts[:tokens],
            pages=v.pages[:tokens],
            tails=v.tails[:tokens],
        )
        return self.tokens[:tokens], view

    def fill(self, batch: RaggedBatch, size: int) -> None:
        """Copy a batch in, and mark the rest of `size` tokens as nobody's."""
        mine, its = self.view, batch.view
        count, tiles = len(batch.tokens), len(its.contexts)
        self.tokens[:count] = batch.tokens
        for there, here in (
            (mine.positions, its.positions),
            (mine.cache_index, its.cache_index),
            (mine.ancestors, its.ancestors),
        ):
            there[:count] = here
        mine.cache_index[count:size].fill_(self.spare)
        mine.positions[count:size].zero_()
        mine.tile_starts[: tiles + 1] = its.tile_starts
        mine.tile_starts[tiles + 1 : size + 1].fill_(count)
        mine.contexts[:tiles] = its.contexts
        mine.tails[:tiles] = its.tails
        mine.pages[:tiles] = its.pages


class GraphedPass:
    """As graphs up to the largest of them, launch by launch beyond."""

    def __init__(
        self, eager: EagerPass, kernels: Kernels, *, most: int, max_pages: int, spare_page: int
    ) -> None:
        """most: tokens of the largest graph. spare_page: a page that no request ever gets."""
        self.eager, self.kernels = eager, kernels
        model, cache = eager.model, eager.caches[0]
        self.sizes = [size for size in SIZES if size <= most]
        most, width = self.sizes[-1], model.config.hidden_size
        self.name = f"graphs up to {most} tokens"
        self.buffers = _Buffers.allocate(most, max_pages, spare_page * cache.shape[3], cache.device)
        embedding = model.embedding
        self.hidden = embedding.new_empty(most, width)
        self.features = embedding.new_empty(most, len(eager.boundaries) * width)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, batch: RaggedBatch, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(batch.tokens)
        size = next((size for size in self.sizes if size >= count), None)
        if size is None:
            return self.eager(batch, step)
        self.buffers.fill(batch, size)
        self.graphs[size].replay()
        return self.hidden[:count], self.features[:count]

    def run(self, size: int) -> None:
        """What the graph of so many tokens does, launch by launch."""
        tokens, view = self.buffers.first(size)
        hidden, features = self.eager.model.forward(
            tokens, self.kernels.begin(view), self.eager.caches, self.eager.boundaries
        )
        self.hidden[:size] = hidden
        self.features[:size] = features

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture all graphs, the largest first, in one pool of memory. Seconds."""
        pool = None
        for done, size in enumerate(reversed(self.sizes)):
            progress(done, len(self.sizes))
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self.run(size)  # compiles, and lets libraries allocate what they need
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.run(size)
            pool = graph.pool()
            self.graphs[size] = graph
        progress(len(self.sizes), len(self.sizes))
