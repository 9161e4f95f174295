"""Which drafters there are, and how each is made for a target.

A drafter is known before the target's weights are read (`Recipe`): so its mistakes show at once.
Its weights are loaded before pages are sized (`Maker`), and what it keeps of each token is counted.
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
from paceline.model.eagle import EagleModel, build_drafter
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


class Maker(Protocol):
    """A drafter whose weights are loaded, before it is known how many pages there will be."""

    def token_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        """Memory that it keeps for each token of K/V."""
        ...

    def make(self, resolved: Resolved, make_kernels: MakeKernels) -> Drafter: ...


class Recipe(Protocol):
    """A drafter before anything is loaded."""

    def load(self, target: LlamaModel, dtype: torch.dtype, device: torch.device) -> Maker:
        """Read its weights. Raises CheckpointError."""
        ...


@dataclass(frozen=True)
class Weightless:
    """A drafter that needs neither weights nor memory on the device. Implements both protocols.

    kind: makes one, without arguments.
    """

    kind: Callable[[], Drafter]

    def load(self, target: LlamaModel, dtype: torch.dtype, device: torch.device) -> Maker:
        return self

    def token_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        return 0

    def make(self, resolved: Resolved, make_kernels: MakeKernels) -> Drafter:
        return self.kind()


@dataclass(frozen=True)
class Eagle:
    """An EAGLE-3 drafter from its checkpoint. Implements `Recipe`."""

    checkpoint: DrafterCheckpoint
    seed: int  # of weights that are made up

    def load(self, target: LlamaModel, dtype: torch.dtype, device: torch.device) -> Maker:
        tensors = load_drafter(self.checkpoint, dtype=dtype, device=device, seed=self.seed)
        return _LoadedEagle(build_drafter(self.checkpoint.config, tensors, target))


@dataclass(frozen=True)
class _LoadedEagle:
    """Implements `Maker`."""

    model: EagleModel

    def token_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        """One layer of K/V, and the feature of each page's last position."""
        config = self.model.config
        feature = config.hidden_size * torch.float32.itemsize
        return config.kv_width * dtype.itemsize + -(-feature // page_size)

    def make(self, resolved: Resolved, make_kernels: MakeKernels) -> Drafter:
        config = self.model.config
        layout = KVLayout(
            pages=resolved.pages,
            page_size=resolved.page_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=resolved.dtype,
        )
        kernels = make_kernels(config, resolved)
        return EagleDrafter(self.model, kernels, layout, resolved.max_running)


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
            dummy=config.load_format == "dummy",
        ),
        seed=config.seed,
    )


DRAFTERS: dict[str, Callable[[EngineConfig, Checkpoint], Recipe]] = {
    "NONE": lambda config, target: Weightless(NoDrafter),
    "NGRAM": lambda config, target: Weightless(NgramDrafter),
    "EAGLE3": _eagle,
}


def recipe_of(config: EngineConfig, target: Checkpoint) -> Recipe:
    """The drafter that the flags ask for. Raises ConfigError and CheckpointError."""
    return DRAFTERS[config.speculative_algorithm](config, target)
