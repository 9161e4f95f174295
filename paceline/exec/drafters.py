"""Which drafters there are, and how each is made for a target.

A drafter is known before the target's weights are read (`Recipe`): so its mistakes show at once,
and the memory that it takes beside the target's K/V is counted when pages are sized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.attention.base import Geometry, Kernels, KVLayout
from paceline.checkpoint import Checkpoint
from paceline.config import EngineConfig
from paceline.drafter_checkpoint import DrafterCheckpoint, open_drafter
from paceline.errors import ConfigError
from paceline.exec.drafter import Drafter, NgramDrafter, NoDrafter
from paceline.exec.eagle import EagleDrafter
from paceline.model.eagle import build_drafter
from paceline.model.eagle_weights import load_drafter
from paceline.model.llama import LlamaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What the engine runs with. Sizes in tokens and pages."""

    device: torch.device
    dtype: torch.dtype
    max_running: int
    max_batched_tokens: int
    max_model_len: int
    page_size: int
    pages: int


MakeKernels = Callable[[Geometry, Resolved], Kernels]


class Recipe(Protocol):
    """A drafter before it is made."""

    def token_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        """Memory that it keeps for each token of K/V."""
        ...

    def make(self, target: LlamaModel, resolved: Resolved, make_kernels: MakeKernels) -> Drafter:
        """Load it. Raises CheckpointError."""
        ...


@dataclass(frozen=True)
class Weightless:
    """A drafter that needs neither weights nor memory on the device."""

    kind: Callable[[], Drafter]

    def token_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        return 0

    def make(self, target: LlamaModel, resolved: Resolved, make_kernels: MakeKernels) -> Drafter:
        return self.kind()


@dataclass(frozen=True)
class Eagle:
    """An EAGLE-3 drafter from its checkpoint."""

    checkpoint: DrafterCheckpoint

    def token_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        """One layer of K/V, and the feature of each page's last position."""
        config = self.checkpoint.config
        feature = config.hidden_size * torch.float32.itemsize
        return config.kv_width * dtype.itemsize + -(-feature // page_size)

    def make(self, target: LlamaModel, resolved: Resolved, make_kernels: MakeKernels) -> Drafter:
        config = self.checkpoint.config
        tensors = load_drafter(self.checkpoint, dtype=resolved.dtype, device=resolved.device)
        layout = KVLayout(
            pages=resolved.pages,
            page_size=resolved.page_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=resolved.dtype,
        )
        return EagleDrafter(
            build_drafter(config, tensors, target),
            make_kernels(config, resolved),
            layout,
            resolved.max_running,
        )


def _eagle(config: EngineConfig, target: Checkpoint) -> Recipe:
    path = config.speculative_draft_model_path
    if path is None:
        raise ConfigError("--speculative-algorithm EAGLE3 needs --speculative-draft-model-path")
    return Eagle(
        open_drafter(
            path,
            target.config,
            layer_ids=config.speculative_draft_layer_ids,
            norm_output=config.speculative_draft_norm_output,
        )
    )


DRAFTERS: dict[str, Callable[[EngineConfig, Checkpoint], Recipe]] = {
    "NONE": lambda config, target: Weightless(NoDrafter),
    "NGRAM": lambda config, target: Weightless(NgramDrafter),
    "EAGLE3": _eagle,
}


def recipe_of(config: EngineConfig, target: Checkpoint) -> Recipe:
    """The drafter that the flags ask for. Raises ConfigError and CheckpointError."""
    return DRAFTERS[config.speculative_algorithm](config, target)
