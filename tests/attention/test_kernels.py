"""The compiled CPU kernels against the torch reference, on random tiles, pages and masks."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.attention.base import AttentionView, Kernels, KVLayout
from paceline.attention.compiled import Unavailable
from paceline.attention.reference import ReferenceKernels
from paceline.model.config import ModelConfig
from paceline.types import TREE_WIDTH

MAX_LENGTH = 600
CPU = torch.device("cpu")


def config(*, heads: int = 6, kv_heads: int = 2, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=5000,
        hidden_size=96,
        intermediate_size=80,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position=MAX_LENGTH,
    )


@functools.cache
def compiled(model: ModelConfig, dtype: torch.dtype) -> Kernels:
    try:
        from paceline.attention.cpu import CpuKernels

        return CpuKernels(model, MAX_LENGTH, dtype)
    except (Unavailable, ImportError) as error:
        pytest.skip(f"no compiled kernels here: {error}")


@dataclass(frozen=True)
class Tile:
    """tokens rows after `context` committed positions; `parents` gives a tree, None a chain."""

    tokens: int
    context: int
    seed: int

    def masks(self) -> list[int]:
        rng = random.Random(self.seed)
        masks: list[int] = []
        for i in range(self.tokens):
            parent = rng.randrange(i) if i and self.seed else i - 1
            masks.append((masks[parent] if i else 0) | (1 << i))
        if self.tokens > TREE_WIDTH:
            return [0] * self.tokens
        return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


def view_of(tiles: list[Tile], page_size: int) -> tuple[AttentionView, int]:
    """A view with shuffled pages, and how many pages there are."""
    most = max(-(-(tile.tokens + tile.context) // page_size) for tile in tiles)
    order = torch.randperm(most * len(tiles) + 3).int()
    pages = order[: most * len(tiles)].view(len(tiles), most).contiguous()
    positions = [torch.arange(t.context, t.context + t.tokens) for t in tiles]
    index = [
        pages[i].long()[p // page_size] * page_size + p % page_size for i, p in enumerate(positions)
    ]
    bounds = [0]
    for tile in tiles:
        bounds.append(bounds[-1] + tile.tokens)
    view = AttentionView(
        positions=torch.cat(positions),
        cache_index=torch.cat(index),
        ancestors=torch.tensor([mask for tile in tiles for mask in tile.masks()]),
        tile_starts=torch.tensor(bounds, dtype=torch.int32),
        contexts=torch.tensor([tile.context for tile in tiles], dtype=torch.int32),
        pages=pages,
        bounds=tuple(bounds),
        tails=torch.tensor([tile.tokens for tile in tiles], dtype=torch.int32),
    )
    return view, len(order)


TILES = st.lists(
    st.builds(
        Tile,
        tokens=st.one_of(st.integers(1, 5), st.integers(1, 64), st.integers(65, 150)),
        context=st.one_of(st.just(0), st.integers(0, 300)),
        seed=st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 32), (8, 1, 128)])
@settings(max_examples=8, deadline=None)
@given(tiles=TILES, page_size=st.sampled_from([1, 7, 16]), seed=st.integers(0, 99))
def test_a_layer_equals_the_reference(
    tiles: list[Tile],
    page_size: int,
    seed: int,
    *,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    torch.manual_seed(seed)
    model = config(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    view, pages = view_of(tiles, page_size)
    if seed % 3 == 0:  # what a drafter's cache looks like: nobody sees a text's first position
        tiles = [dataclasses.replace(t, context=max(t.context, 1)) for t in tiles]
        view, pages = view_of(tiles, page_size)
        view = dataclasses.replace(view, hidden=1)
    layout = KVLayout(
        pages=pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    cache = layout.allocate(CPU).normal_()
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(view.bounds[-1], width)
    norms = (torch.rand(head_dim), torch.rand(head_dim)) if seed % 2 else None
    results = []
    for kernels in (compiled(model, dtype), ReferenceKernels(model, MAX_LENGTH, CPU)):
        step, store = kernels.begin(view), cache.clone()
        q = step.rotate_and_store(qkv.clone(), store, norms)
        results.append((q, store.float(), step.attend(q, store)))
    (q, store, out), (wanted_q, wanted_store, wanted) = results
    torch.testing.assert_close(q, wanted_q, atol=2e-5, rtol=2e-5)
    if norms is None or dtype == torch.float32:  # a norm's last bit may turn a bfloat16 rounding
        torch.testing.assert_close(store, wanted_store, atol=2e-5, rtol=2e-5)
    tolerance = 2e-5 if norms is None or dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("fast", [True, False])
@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(2, 64), context=st.integers(1, 90), seed=st.integers(0, 9), data=st.data()
)
def test_a_tree_level_by_level_is_the_tree_at_once(
    tokens: int, context: int, seed: int, data: st.DataObject, *, fast: bool
) -> None:
    """The last tokens of a tail, as a tile of their own, see what is in the tail before them."""
    torch.manual_seed(seed)
    model = config()
    kernels = compiled(model, torch.float32) if fast else ReferenceKernels(model, MAX_LENGTH, CPU)
    whole, pages = view_of([Tile(tokens, context, seed)], 7)
    layout = KVLayout(pages=pages, page_size=7, kv_heads=2, head_dim=64, dtype=torch.float32)
    cache = layout.allocate(CPU).normal_()
    qkv = torch.randn(tokens, 10 * 64)
    step = kernels.begin(whole)
    at_once = step.attend(step.rotate_and_store(qkv, cache, None), cache)
    cut = data.draw(st.integers(1, tokens - 1))
    for lo, hi in ((0, cut), (cut, tokens)):
        level = dataclasses.replace(
            whole,
            positions=whole.positions[lo:hi],
            cache_index=whole.cache_index[lo:hi],
            ancestors=whole.ancestors[lo:hi].contiguous(),
            tile_starts=torch.tensor([0, hi - lo], dtype=torch.int32),
            bounds=(0, hi - lo),
            tails=torch.tensor([hi], dtype=torch.int32),
        )
        step = kernels.begin(level)
        part = step.attend(step.rotate_and_store(qkv[lo:hi].clone(), cache, None), cache)
        torch.testing.assert_close(part, at_once[lo:hi], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("normed", [True, False])
def test_keys_and_values_alone_are_stored_as_with_queries(normed: bool) -> None:
    model = config()
    view, pages = view_of([Tile(5, 9, 0), Tile(1, 30, 0)], 4)
    layout = KVLayout(pages=pages, page_size=4, kv_heads=2, head_dim=64, dtype=torch.float32)
    qkv, norm = torch.randn(6, 10 * 64), torch.rand(64) if normed else None
    for kernels in (compiled(model, torch.float32), ReferenceKernels(model, MAX_LENGTH, CPU)):
        step, both, alone = kernels.begin(view), *(layout.allocate(CPU).zero_() for _ in range(2))
        step.rotate_and_store(qkv.clone(), both, None if norm is None else (norm, norm))
        step.store(qkv[:, 6 * 64 :].clone(), alone, norm)
        assert torch.equal(both, alone) and bool(both.any())


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), delta=st.booleans())
def test_norm_and_silu_equal_the_reference(rows: int, width: int, delta: bool) -> None:
    model = config()
    view, _ = view_of([Tile(rows, 0, 0)], 16)
    steps = [
        kernels.begin(view)
        for kernels in (
            compiled(model, torch.float32),
            ReferenceKernels(model, MAX_LENGTH, CPU),
        )
    ]
    x, weight = torch.randn(rows, width), torch.randn(width)
    added = torch.randn(rows, width) if delta else None
    residuals = [x.clone(), x.clone()]
    out = [s.add_norm(r, added, weight) for s, r in zip(steps, residuals, strict=True)]
    torch.testing.assert_close(out[0], out[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(residuals[0], residuals[1])
    gate_up = torch.randn(rows, 2 * width) * 30
    a, b = (step.silu_mul(gate_up) for step in steps)
    torch.testing.assert_close(a, b, atol=1e-4, rtol=2e-5)


def noisy_rows(
    rows: int, vocab_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Logits, seeds and positions (some -1), first of equal logits, then of random ones."""
    generator = torch.Generator().manual_seed(1)
    for scale in (0.0, 1.0):
        yield (
            torch.randn(rows, vocab_size, generator=generator) * scale,
            torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
            torch.randint(-1, 9, (rows,), generator=generator),
        )


def test_noisy_argmax_equals_the_reference_bit_for_bit() -> None:
    """On equal logits the choice is the noise alone: any bit that differs would show."""
    model = config()
    fast, slow = compiled(model, torch.float32), ReferenceKernels(model, MAX_LENGTH, CPU)
    for logits, seeds, positions in noisy_rows(300, model.vocab_size):
        a, b = (k.noisy_argmax(logits.clone(), seeds, positions) for k in (fast, slow))
        assert torch.equal(a, b)


def test_noise_of_some_ids_is_that_of_the_whole_vocabulary() -> None:
    model = config()
    fast, slow = compiled(model, torch.float32), ReferenceKernels(model, MAX_LENGTH, CPU)
    ids = torch.randperm(model.vocab_size)[:700].sort().values.int()
    seeds, positions = torch.arange(9), torch.tensor([-1, 0, 1, 2, 3, -1, 99, 5, 7])
    logits = torch.randn(9, 700)
    added = [logits.clone(), logits.clone()]
    for kernels, out in zip((fast, slow), added, strict=True):
        kernels.add_noise(out, ids, seeds, positions)
    assert torch.equal(added[0], added[1]) and torch.equal(added[0][0], logits[0])
    whole = torch.zeros(9, model.vocab_size)
    slow.add_noise(whole, slow.ids, seeds, positions)
    assert torch.equal(added[0], logits + whole[:, ids.long()])


@pytest.mark.parametrize("noisy", [False, True])
def test_argmax_takes_the_first_of_equals_and_survives_infinities(noisy: bool) -> None:
    model = config()
    logits = torch.full((2, model.vocab_size), -torch.inf)
    logits[0, 4321] = -5.0
    logits[1, [17, 3000]] = 40.0 if not noisy else torch.tensor([40.0, -40.0])
    positions = torch.full((2,), 3 if noisy else -1)
    for kernels in (compiled(model, torch.float32), ReferenceKernels(model, MAX_LENGTH, CPU)):
        chosen = kernels.noisy_argmax(logits.clone(), torch.tensor([1, 2]), positions)
        assert chosen.tolist() == [4321, 17]
