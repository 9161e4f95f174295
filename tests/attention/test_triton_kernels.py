"""The Triton kernels against the torch reference: on a GPU, or by Triton's interpreter without."""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.attention.base import AttentionView, KVLayout
from paceline.attention.compiled import Unavailable
from paceline.attention.reference import ReferenceKernels
from paceline.types import TREE_WIDTH
from tests.attention.test_kernels import MAX_LENGTH, Tile, config, noisy_rows, view_of

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined


def _let_arrays_of_one_be_numbers() -> None:
    """Triton 3.6's interpreter counts on what numpy 2.4 refuses: int() of an array of one."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def and_numbers(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = and_numbers


FORMATS = [torch.float32, torch.bfloat16, torch.float16] if CUDA else [torch.float32]
EXAMPLES = 25 if CUDA else 10
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

try:
    from paceline.attention.gpu import Cut, GpuKernels, Tuning
except Unavailable as error:
    pytest.skip(f"no Triton here: {error}", allow_module_level=True)

if not CUDA:
    _let_arrays_of_one_be_numbers()

SMALL = Tuning(
    one=Cut(rows=16, keys=32, stages=2, programs=1),
    few=Cut(rows=16, keys=16, stages=2, programs=2),
    many=Cut(rows=32, keys=16, stages=2, programs=1),
    chunk=Cut(rows=32, keys=16, stages=2, programs=0),
)
"""Cut so that a few hundred positions are many blocks: the interpreter is slow."""

CASES = st.lists(
    st.builds(
        Tile,
        tokens=st.one_of(st.integers(1, 5), st.integers(1, 64)),
        context=st.one_of(st.just(0), st.integers(0, 120)),
        seed=st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
)


def on(device: torch.device, view: AttentionView) -> AttentionView:
    found = {
        field.name: value.to(device)
        for field in dataclasses.fields(view)
        if isinstance(value := getattr(view, field.name), torch.Tensor)
    }
    return dataclasses.replace(view, **found)


def padded(view: AttentionView, tiles: int, tokens: int) -> AttentionView:
    """As a graph sees it: empty tiles, tokens that belong to none, lengths on the device only."""
    more = tiles - len(view.contexts)
    spare = len(view.positions), tokens - len(view.positions)

    def longer(x: torch.Tensor, by: int) -> torch.Tensor:
        return torch.cat((x, x.new_zeros(by, *x.shape[1:])))

    return dataclasses.replace(
        view,
        positions=longer(view.positions, spare[1]),
        cache_index=longer(view.cache_index, spare[1]),
        ancestors=longer(view.ancestors, spare[1]),
        tile_starts=torch.cat((view.tile_starts, view.tile_starts[-1:].expand(more))),
        contexts=longer(view.contexts, more),
        pages=longer(view.pages, more),
        tails=longer(view.tails, more),
        bounds=(),
    )


SHAPES = [(6, 2, 64, torch.float32)]
if CUDA:
    SHAPES += [(2, 2, 64, torch.float16), (8, 1, 128, torch.bfloat16), (7, 1, 64, torch.bfloat16)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype"), SHAPES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(tiles=CASES, page_size=st.sampled_from([7, 16]), seed=st.integers(0, 99))
def test_attention_equals_the_reference(
    tiles: list[Tile], page_size: int, seed: int, *, heads: int, kv_heads: int, head_dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    model = config(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    hidden = int(seed % 3 == 0)
    tiles = [dataclasses.replace(t, context=max(t.context, hidden)) for t in tiles]
    view, pages = view_of(tiles, page_size)
    view = on(DEVICE, dataclasses.replace(view, hidden=hidden))
    layout = KVLayout(
        pages=pages, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    cache = layout.allocate(DEVICE).normal_()
    q = torch.randn(view.bounds[-1], heads * head_dim, device=DEVICE).to(dtype)
    wanted = ReferenceKernels(model, MAX_LENGTH, DEVICE).begin(view).attend(q, cache)
    kernels = GpuKernels(model, MAX_LENGTH, DEVICE, SMALL)
    tolerance = TOLERANCE[dtype]
    found = kernels.begin(view).attend(q, cache)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    graph = padded(view, len(tiles) + 3, len(q) + 5)
    longer = torch.cat((q, q.new_full((5, q.shape[1]), torch.nan)))
    again = kernels.begin(graph).attend(longer, cache)[: len(q)]
    torch.testing.assert_close(again, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("as_graph", [False, True])
def test_long_chunks_equal_the_reference(dtype: torch.dtype, as_graph: bool) -> None:
    torch.manual_seed(0)
    model = config(heads=4, kv_heads=2, head_dim=64)
    view, pages = view_of([Tile(1, 40, 0), Tile(90, 37, 0), Tile(6, 11, 2), Tile(70, 0, 0)], 16)
    view = on(DEVICE, view)
    layout = KVLayout(pages=pages, page_size=16, kv_heads=2, head_dim=64, dtype=dtype)
    cache = layout.allocate(DEVICE).normal_()
    q = torch.randn(view.bounds[-1], 4 * 64, device=DEVICE).to(dtype)
    for hidden in (0, 1):
        view = dataclasses.replace(view, hidden=hidden)
        wanted = ReferenceKernels(model, MAX_LENGTH, DEVICE).begin(view).attend(q, cache)
        step = GpuKernels(model, MAX_LENGTH, DEVICE, SMALL).begin(
            padded(view, 4, len(q)) if as_graph else view
        )
        rows = slice(0, 91 + 6) if hidden else slice(None)  # nothing is left of a first token
        found = step.attend(q, cache)
        torch.testing.assert_close(
            found[rows], wanted[rows], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_and_writing_equal_the_reference(dtype: torch.dtype, normed: bool) -> None:
    torch.manual_seed(0)
    model = config(heads=6, kv_heads=2, head_dim=64)
    view, pages = view_of([Tile(5, 9, 0), Tile(1, 30, 0), Tile(9, 33, 1)], 4)
    view = on(DEVICE, view)
    layout = KVLayout(pages=pages, page_size=4, kv_heads=2, head_dim=64, dtype=dtype)
    qkv = torch.randn(15, 10 * 64, device=DEVICE).to(dtype)
    norms = (torch.rand(64), torch.rand(64))
    norms = tuple(n.to(DEVICE, dtype) for n in norms) if normed else None
    results = []
    for kernels in (
        GpuKernels(model, MAX_LENGTH, DEVICE, SMALL), ReferenceKernels(model, MAX_LENGTH, DEVICE),
    ):  # fmt: skip
        step, both, alone = (
            kernels.begin(view), *(layout.allocate(DEVICE).zero_() for _ in range(2)),
        )  # fmt: skip
        q = step.rotate_and_store(qkv.clone(), both, norms)
        step.store(qkv[:, 6 * 64 :].contiguous(), alone, None if norms is None else norms[1])
        assert torch.equal(both, alone)
        results.append((q, both))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(results[0], results[1], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", FORMATS)
def test_norm_and_silu_equal_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = config()
    rng = random.Random(0)
    for _ in range(4):
        rows, width = rng.randint(1, 9), rng.randint(1, 1300)
        view = on(DEVICE, view_of([Tile(rows, 0, 0)], 16)[0])
        steps = [
            GpuKernels(model, MAX_LENGTH, DEVICE, SMALL).begin(view),
            ReferenceKernels(model, MAX_LENGTH, DEVICE).begin(view),
        ]
        x = torch.randn(rows, width, device=DEVICE).to(dtype)
        weight = torch.randn(width, device=DEVICE).to(dtype)
        for delta in (None, torch.randn_like(x)):
            residuals = [x.clone(), x.clone()]
            out = [s.add_norm(r, delta, weight) for s, r in zip(steps, residuals, strict=True)]
            torch.testing.assert_close(out[0], out[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            assert torch.equal(residuals[0], residuals[1])
        gate_up = torch.randn(rows, 2 * width, device=DEVICE).to(dtype) * 8
        found, wanted = (step.silu_mul(gate_up) for step in steps)
        torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_noise_and_choice_have_the_same_bits() -> None:
    """On equal logits the choice is the noise alone: any bit that differs would show."""
    model = config()
    fast = GpuKernels(model, MAX_LENGTH, DEVICE)
    slow = ReferenceKernels(model, MAX_LENGTH, torch.device("cpu"))
    for logits, seeds, positions in noisy_rows(40, model.vocab_size):
        where = [x.to(DEVICE) for x in (logits, seeds, positions)]
        assert torch.equal(
            fast.noisy_argmax(*where).cpu(), slow.noisy_argmax(logits, seeds, positions)
        )
        ids = torch.randperm(model.vocab_size)[:700].sort().values.int()
        some = logits[:, :700].contiguous()
        added = some.to(DEVICE, copy=True)
        fast.add_noise(added, ids.to(DEVICE), *where[1:])
        slow.add_noise(some, ids, seeds, positions)
        assert torch.equal(added.cpu(), some)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's numpy
@pytest.mark.parametrize("width", [4096, 5000, 8192])  # whole blocks, and not
def test_argmax_takes_the_first_of_equals_and_survives_what_is_no_number(width: int) -> None:
    fast = GpuKernels(config(), MAX_LENGTH, DEVICE)
    logits = torch.full((3, width), -torch.inf, device=DEVICE)
    logits[0, 4021] = -5.0
    logits[1, [17, 4050]] = 40.0
    logits[2] = torch.nan
    nowhere = torch.full((3,), -1, device=DEVICE)
    chosen = fast.noisy_argmax(logits, torch.zeros_like(nowhere), nowhere)
    assert chosen[:2].tolist() == [4021, 17] and 0 <= int(chosen[2]) < width


def test_heads_of_other_sizes_are_refused() -> None:
    with pytest.raises(Unavailable, match="heads of 80"):
        GpuKernels(config(head_dim=80), MAX_LENGTH, DEVICE)
    assert TREE_WIDTH == 64
