"""The EAGLE-3 network: one decoder layer that guesses the token after next (arXiv 2503.01840).

    g        fused feature of a position: fc of the target's residual stream at three places
    a        [norm(embedding of the next token), norm(g)], twice the hidden size
    r, y     r = g + attention(a), y = r + MLP(norm(r))
    logits   head(norm(y)) over a draft vocabulary
    deeper   y takes the place of g

K and V of a position depend on its token and on g of the position before, not on attention: so the
target's own pass can write them for all its rows (`write`), as one more layer, and the drafter is
never behind. Which norm a checkpoint has where is in `EagleConfig`. Knows no request or tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.attention.base import Step
from paceline.model.eagle_config import EagleConfig
from paceline.model.linear import Linear, pack_linear
from paceline.model.llama import LlamaModel, Norms, norm_weight


@dataclass(frozen=True, slots=True)
class EagleModel:
    """Weights of a drafter, packed. h: its hidden size.

    embedding: (vocab, h), the target's own unless the checkpoint has one. feature_norms: one over
    all features, or one for each, or none. ids: (draft vocab,) int32, the target's id of each.
    """

    config: EagleConfig
    embedding: torch.Tensor
    feature_norms: tuple[torch.Tensor, ...]
    fc: Linear
    token_norm: torch.Tensor
    hidden_norm: torch.Tensor
    kv: Linear
    qkv: Linear
    qk_norms: Norms | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    final_norm: torch.Tensor
    head: Linear
    ids: torch.Tensor

    def fuse(self, features: torch.Tensor, step: Step) -> torch.Tensor:
        """g of each position: (T, features * target hidden) -> (T, h)."""
        if self.feature_norms:
            parts = features.chunk(len(self.feature_norms), dim=1)
            normed = [
                step.add_norm(part.contiguous(), None, norm)
                for part, norm in zip(parts, self.feature_norms, strict=True)
            ]
            features = torch.cat(normed, 1)
        return self.fc(features)

    def write(
        self, tokens: torch.Tensor, parents: torch.Tensor, step: Step, cache: torch.Tensor
    ) -> None:
        """Write K and V of tokens: (T,) int64, parents: (T, h), g of the position before each."""
        both, _ = self._inputs(tokens, parents, step)
        step.store(self.kv(both), cache, None if self.qk_norms is None else self.qk_norms[1])

    def forward(
        self, tokens: torch.Tensor, parents: torch.Tensor, step: Step, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One level of drafting; also writes K and V. tokens, parents as in `write`.

        Returns logits of the token after each, (T, draft vocab) float32, and (T, h), what the next
        level takes as `parents`.
        """
        both, normed = self._inputs(tokens, parents, step)
        q = step.rotate_and_store(self.qkv(both), cache, self.qk_norms)
        y = (normed if self.config.norm_before_residual else parents).clone()
        h = step.add_norm(y, self.out(step.attend(q, cache)), self.post_norm)
        y.add_(self.down(step.silu_mul(self.gate_up(h))))
        final = step.add_norm(y, None, self.final_norm)
        logits = self.head(final if self.config.norm_head else y).float()
        return logits, final if self.config.feed_normed else y

    def _inputs(
        self, tokens: torch.Tensor, parents: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What q, k and v are made of: (T, 2 h); and its second half, the normed `parents`."""
        embedded = self.embedding[tokens].to(parents.dtype)
        normed = step.add_norm(parents, None, self.hidden_norm)
        return torch.cat((step.add_norm(embedded, None, self.token_norm), normed), 1), normed


def build_drafter(
    config: EagleConfig, tensors: Mapping[str, torch.Tensor], target: LlamaModel
) -> EagleModel:
    """Pack the tensors of `draft_tensors(config)`; what the checkpoint lacks is the target's."""
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."

    def linear(*names: str) -> Linear:
        biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
        weight = torch.cat([tensors[f"{name}.weight"] for name in names])
        return pack_linear(weight, torch.cat(biases) if biases else None)

    def norm(name: str) -> torch.Tensor:
        return norm_weight(tensors[f"{name}.weight"])

    feature_norms: tuple[torch.Tensor, ...] = ()
    if config.norm_before_fc:
        feature_norms = (norm("input_norm"),)
    if config.fc_norm:
        feature_norms = tuple(norm(f"fc_norm.{i}") for i in range(len(config.boundaries)))
    heads = tuple(attention + name for name in ("q_proj", "k_proj", "v_proj"))
    qk_norms = (norm(attention + "q_norm"), norm(attention + "k_norm")) if config.qk_norm else None
    return EagleModel(
        config=config,
        embedding=tensors["embed_tokens.weight"] if config.own_embedding else target.embedding,
        feature_norms=feature_norms,
        fc=linear("fc"),
        token_norm=norm("midlayer.input_layernorm"),
        hidden_norm=norm("midlayer.hidden_norm"),
        kv=linear(*heads[1:]),
        qkv=linear(*heads),
        qk_norms=qk_norms,
        out=linear(attention + "o_proj"),
        post_norm=norm("midlayer.post_attention_layernorm"),
        gate_up=linear(mlp + "gate_proj", mlp + "up_proj"),
        down=linear(mlp + "down_proj"),
        final_norm=norm("norm"),
        head=linear("lm_head") if config.own_head else target.head,
        ids=_target_ids(tensors.get("d2t"), config, target.embedding.device),
    )


def _target_ids(
    d2t: torch.Tensor | None, config: EagleConfig, device: torch.device
) -> torch.Tensor:
    """Draft id i stands for target id i + d2t[i]; without a table for itself."""
    ids = torch.arange(config.draft_vocab_size, device=device)
    return (ids if d2t is None else ids + d2t.to(device)).int()
