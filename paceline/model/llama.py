"""The Llama family as a pure function: tokens in, residual stream and logits out.

Covers Llama, Mistral, Qwen2 and Qwen3, told apart by `ModelConfig` alone. The model holds weights
only. Everything that belongs to a step comes in as arguments: token ids, the kernels bound to the
step, the K/V storage. It knows no request, page table, drafter or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.attention.base import Step
from paceline.model.config import ModelConfig
from paceline.model.linear import Linear, pack_linear
from paceline.model.weights import expected_tensors

Norms = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, its projections packed."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norms: Norms | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaModel:
    """Weights of a decoder. Activations are float32 on a CPU, the weights' format on a GPU."""

    config: ModelConfig
    embedding: torch.Tensor  # (vocab, hidden)
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: Linear

    def forward(
        self,
        tokens: torch.Tensor,
        step: Step,
        caches: Sequence[torch.Tensor],
        boundaries: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after the last layer, before the final norm; and at `boundaries`.

        tokens: (T,) int64. caches: K/V storage of each layer, written at the step's positions.
        boundaries: b is the stream before layer b; as many as there are layers: after the last.
        Returns (T, hidden) and (T, boundaries * hidden), in the order of `boundaries`.
        """
        x = self.embedding[tokens]
        if x.device.type == "cpu":
            x = x.float()
        width = x.shape[1]
        seen = x.new_empty(len(x), len(boundaries) * width)
        places = {b: seen[:, i * width : (i + 1) * width] for i, b in enumerate(boundaries)}
        delta = None
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            h = step.add_norm(x, delta, layer.input_norm)
            if number in places:
                places[number].copy_(x)
            q = step.rotate_and_store(layer.qkv(h), cache, layer.qk_norms)
            delta = layer.out(step.attend(q, cache))
            h = step.add_norm(x, delta, layer.post_norm)
            delta = layer.down(step.silu_mul(layer.gate_up(h)))
        if delta is not None:
            x.add_(delta)
        if len(self.layers) in places:
            places[len(self.layers)].copy_(x)
        return x, seen

    def logits(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Logits of some rows of `forward`'s result: (S, hidden) -> (S, vocab) float32."""
        return self.head(step.add_norm(hidden, None, self.final_norm)).float()


def build_model(
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> LlamaModel:
    """Pack weights as they stream in, so that no second copy of the model exists.

    weights: (Hugging Face name, tensor) in any order. progress: called with (layers done, layers).
    """
    groups = _Groups(config)
    layers: dict[int, Layer] = {}
    top: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        group = groups.add(name, tensor)
        if name.startswith("model.layers."):
            if group is not None:
                index = int(name.split(".")[2])
                layers[index] = _layer(config, group)
                if progress is not None:
                    progress(len(layers), config.num_layers)
        else:
            top[name] = tensor
    embedding = top["model.embed_tokens.weight"]
    return LlamaModel(
        config=config,
        embedding=embedding,
        layers=tuple(layers[i] for i in range(config.num_layers)),
        final_norm=norm_weight(top["model.norm.weight"]),
        head=pack_linear(embedding if config.tie_embeddings else top["lm_head.weight"]),
    )


class _Groups:
    """Collects the tensors of a layer until all are there."""

    def __init__(self, config: ModelConfig) -> None:
        self.missing: dict[str, set[str]] = {}
        self.found: dict[str, dict[str, torch.Tensor]] = {}
        for name in expected_tensors(config):
            if name.startswith("model.layers."):
                self.missing.setdefault(_prefix(name), set()).add(name)

    def add(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """The layer's tensors by their short names once complete, else None."""
        if not name.startswith("model.layers."):
            return None
        prefix = _prefix(name)
        group = self.found.setdefault(prefix, {})
        group[name.removeprefix(prefix)] = tensor
        self.missing[prefix].discard(name)
        return None if self.missing[prefix] else self.found.pop(prefix)


def _prefix(name: str) -> str:
    return ".".join(name.split(".", 3)[:3]) + "."


def _layer(config: ModelConfig, w: dict[str, torch.Tensor]) -> Layer:
    def packed(*parts: str) -> Linear:
        weight = torch.cat([w[f"{part}.weight"] for part in parts])
        biases = [w[f"{part}.bias"] for part in parts if f"{part}.bias" in w]
        return pack_linear(weight, torch.cat(biases) if biases else None)

    attention, mlp = "self_attn.", "mlp."
    qk_norms = None
    if config.qk_norm:
        qk_norms = (
            norm_weight(w[attention + "q_norm.weight"]),
            norm_weight(w[attention + "k_norm.weight"]),
        )
    return Layer(
        input_norm=norm_weight(w["input_layernorm.weight"]),
        qkv=packed(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
        qk_norms=qk_norms,
        out=packed(attention + "o_proj"),
        post_norm=norm_weight(w["post_attention_layernorm.weight"]),
        gate_up=packed(mlp + "gate_proj", mlp + "up_proj"),
        down=packed(mlp + "down_proj"),
    )


def norm_weight(weight: torch.Tensor) -> torch.Tensor:
    """Norm weights in the activations' format."""
    return weight.float().contiguous() if weight.device.type == "cpu" else weight
