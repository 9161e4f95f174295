"""EAGLE-3 drafters for the tiny target of tests/test_engine.py, and what they must draft.

`recomputed` drafts from a text alone, in an engine that has seen nothing else; `dense` does so
without pages, trees or our network, in plain torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from paceline.attention.base import KVLayout
from paceline.attention.reference import ReferenceKernels
from paceline.cache.pool import PagePool
from paceline.exec.eagle import EagleDrafter
from paceline.exec.executor import Executor
from paceline.exec.slots import Slots
from paceline.model.eagle import EagleModel, build_drafter
from paceline.model.eagle_config import EagleConfig, draft_tensors
from paceline.model.eagle_weights import dummy_drafter
from paceline.model.llama import LlamaModel
from paceline.model.rope import rope_table
from paceline.plan.step import Admission, Choice, DraftShape, PageUpdate, Row, StepPlan
from paceline.types import SamplingParams

LENGTH = 400
CPU = torch.device("cpu")


def eagle_config(**changes: Any) -> EagleConfig:
    """For the target of tests/test_engine.py (hidden 64, 2 layers, 300 tokens)."""
    values: dict[str, Any] = dict(
        hidden_size=64,
        target_hidden_size=64,
        intermediate_size=80,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rms_norm_eps=1e-5,
        max_position=LENGTH,
        vocab_size=300,
        draft_vocab_size=120,
        boundaries=(0, 1, 2),
    )
    return EagleConfig(**(values | changes))


@functools.cache
def weights(config: EagleConfig) -> dict[str, torch.Tensor]:
    """Random ones, so large that features, context and path all matter.

    The tiny target's stream is about 60 long a number: unless it is normed, fc brings it to 1, or
    what attention adds to it would not show.
    """
    normed = config.norm_before_fc or config.fc_norm
    tensors = dummy_drafter(config, 1, dtype=torch.float32)
    scaled = {}
    for name, tensor in tensors.items():
        fixed = name == "d2t" or name.endswith("norm.weight")
        factor = 0.1 if name == "fc.weight" and not normed else 6.0
        scaled[name] = tensor if fixed else tensor * factor
    return scaled


def drafter_model(target: LlamaModel, config: EagleConfig) -> EagleModel:
    device = target.embedding.device
    tensors = {name: tensor.to(device) for name, tensor in weights(config).items()}
    assert set(tensors) == set(draft_tensors(config))
    return build_drafter(config, tensors, target)


def make_drafter(
    model: EagleModel, *, pages: int, page_size: int, slots: int, reference: bool = False
) -> EagleDrafter:
    from paceline.exec.drafters import Resolved
    from paceline.exec.startup import make_kernels

    config, device = model.config, model.ids.device
    resolved = Resolved(
        device=device, dtype=torch.float32, max_running=slots, max_batched_tokens=1,
        max_model_len=LENGTH, page_size=page_size, pages=pages,
    )  # fmt: skip
    kernels = (
        ReferenceKernels(config, LENGTH, device) if reference else make_kernels(config, resolved)
    )
    layout = KVLayout(
        pages=pages, page_size=page_size, kv_heads=config.num_kv_heads,
        head_dim=config.head_dim, dtype=torch.float32,
    )  # fmt: skip
    drafter = EagleDrafter(model, kernels, layout, slots)
    drafter.caches[0].fill_(torch.nan)  # whoever reads what was not written will show
    return drafter


@dataclass(frozen=True)
class State:
    """What an EAGLE-3 drafter knows of a text: entries of its tokens 1, 2, ..., the last feature.

    entries: (positions - 1, 2, kv_heads, head_dim). root: (h,).
    """

    entries: torch.Tensor
    root: torch.Tensor


def state_of(drafter: EagleDrafter, slots: Slots, slot: int, length: int) -> State:
    cache = drafter.caches[0]
    places = torch.arange(1, length)
    page = slots.pages[slot].long()[places // cache.shape[3]]
    return State(cache[page, :, :, places % cache.shape[3]], drafter._roots[slot].clone())


@torch.inference_mode()
def recomputed(
    target: LlamaModel,
    model: EagleModel,
    text: list[int],
    params: SamplingParams,
    shape: DraftShape,
    drafts: int,
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], State]:
    """(tokens, parents) after `text`, whose last token is yet to be computed; the state before."""
    c, page_size, pages = target.config, LENGTH, 1
    drafter = make_drafter(model, pages=pages, page_size=page_size, slots=1)
    layout = KVLayout(
        pages=pages, page_size=page_size, kv_heads=c.num_kv_heads, head_dim=c.head_dim,
        dtype=torch.float32,
    )  # fmt: skip
    executor = Executor(
        model=target,
        kernels=ReferenceKernels(c, LENGTH, CPU),
        caches=[layout.allocate(CPU) for _ in target.layers],
        slots=Slots.allocate(1, pages, CPU),
        drafter=drafter,
    )
    plan = StepPlan(
        rows=(Row(slot=0, generation=1, start=0, tokens=tuple(text[:-1]), samples=False),),
        choice=Choice(shape=DraftShape(), reason="test"),
        reservation=PagePool(pages, page_size).reserve({0: pages}),
        admissions=(Admission(slot=0, params=params, tokens=tuple(text)),),
        page_updates=(PageUpdate(slot=0, first=0, pages=(0,)),),
    )
    executor.execute(plan)
    assert executor.drafter_failures == 0
    row = Row(
        slot=0, generation=1, start=len(text) - 1, tokens=(text[-1],), samples=True, drafts=drafts
    )
    plan = dataclasses.replace(
        plan,
        rows=(row,),
        choice=Choice(shape=shape, reason="test"),
        reservation=PagePool(pages, page_size).reserve({0: pages}),
        admissions=(),
        page_updates=(),
    )
    executor.slots.prepare(plan)
    state = state_of(drafter, executor.slots, 0, len(text) - 1)
    found = drafter.propose(plan, executor.slots)
    return (found.tokens[0], found.parents[0]), state


# --- In plain torch ---------------------------------------------------------------------------


class Dense:
    """The published network over whole sequences. Positions are those of the features."""

    def __init__(self, config: EagleConfig, target: LlamaModel) -> None:
        self.c = config
        self.w = weights(config)
        self.embedding = self.w.get("embed_tokens.weight", target.embedding)
        self.cos, self.sin = rope_table(config.rope, config.head_dim, LENGTH)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.c.rms_norm_eps)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        if self.c.norm_before_fc:
            features = self.norm(features, "input_norm")
        if self.c.fc_norm:
            parts = features.chunk(len(self.c.boundaries), -1)
            features = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
        return self.linear(features, "fc")

    def heads(self, x: torch.Tensor, name: str, count: int) -> torch.Tensor:
        x = self.linear(x, f"midlayer.self_attn.{name}_proj").view(len(x), count, -1)
        if name == "v":
            return x.transpose(0, 1)
        if self.c.qk_norm:
            x = self.norm(x, f"midlayer.self_attn.{name}_norm")
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).transpose(0, 1)

    def last(self, tokens: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and next state at the end of (token, state before it) pairs from the start on."""
        c, e = self.c, self.embedding[torch.tensor(tokens)]
        normed = self.norm(states, "midlayer.hidden_norm")
        both = torch.cat((self.norm(e, "midlayer.input_layernorm"), normed), -1)
        group = c.num_heads // c.num_kv_heads
        mixed = functional.scaled_dot_product_attention(
            self.heads(both, "q", c.num_heads),
            self.heads(both, "k", c.num_kv_heads).repeat_interleave(group, 0),
            self.heads(both, "v", c.num_kv_heads).repeat_interleave(group, 0),
            is_causal=True,
            scale=1 / math.sqrt(c.head_dim),
        )
        attended = self.linear(mixed.transpose(0, 1).flatten(1), "midlayer.self_attn.o_proj")
        r = (normed if c.norm_before_residual else states) + attended
        h = self.norm(r, "midlayer.post_attention_layernorm")
        gate, up = (self.linear(h, f"midlayer.mlp.{n}_proj") for n in ("gate", "up"))
        y = (r + self.linear(functional.silu(gate) * up, "midlayer.mlp.down_proj"))[-1]
        final = self.norm(y, "norm")
        logits = self.linear(final if c.norm_head else y, "lm_head")
        return logits, final if c.feed_normed else y


@dataclass(frozen=True)
class Candidate:
    """A path of tokens after the text, and its log-probability."""

    path: tuple[int, ...]
    worth: float


def dense_tree(
    dense: Dense, text: list[int], fused: torch.Tensor, *, depth: int, branching: int, drafts: int
) -> list[Candidate]:
    """The best `drafts` candidates of a greedy request, every path computed on its own.

    fused: (len(text) - 1, h), features of all tokens but the last.
    """
    ids = torch.arange(dense.c.draft_vocab_size) + dense.w.get("d2t", 0)
    beam_width = branching if depth < 2 else min(branching, drafts // (depth - 1))
    beam = [(Candidate((), 0.0), fused)]
    scored: list[Candidate] = []
    for _ in range(depth):
        grown = []
        for node, states in beam:
            logits, state = dense.last([*text[1:], *node.path], states)
            best = logits.log_softmax(-1).topk(branching)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                child = Candidate((*node.path, int(ids[index])), node.worth + value)
                grown.append((child, torch.cat((states, state[None]))))
        scored += [child for child, _ in grown]
        beam = sorted(grown, key=lambda each: -each[0].worth)[:beam_width]
    return sorted(scored, key=lambda each: -each.worth)[:drafts]
