"""The demo model against reference values: ids of llama.cpp, numbers of transformers in float32.

All texts go through in one step, each followed by the reference's own continuation, so that every
position of it is checked whatever the one before gave.
"""

from __future__ import annotations

import functools
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.attention.base import AttentionView, Kernels, KVLayout
from paceline.attention.reference import ReferenceKernels
from paceline.checkpoint import open_checkpoint
from paceline.model.llama import LlamaModel, build_model
from paceline.model.weights import load_weights
from paceline.serve.tokenizer import Tokenizer, load_tokenizer
from paceline.types import TREE_WIDTH
from tests.model.support import LENGTH, compiled_kernels

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text()
)["cases"]
CPU = torch.device("cpu")
PAGE = 16
CHAIN = [(2 << i) - 1 if i < 63 else -1 for i in range(TREE_WIDTH)]
# Cases by kernels and number format. The reference kernels are slow: one text that is longer than a
# tree may be, two short ones.
RUNS = {
    ("compiled", torch.float32): tuple(range(len(CASES))),
    ("reference", torch.float32): (1, 6, 10),
    ("compiled", torch.bfloat16): tuple(range(0, len(CASES), 2)),
}
FLOAT32 = [(kind, n) for (kind, dtype), ns in RUNS.items() if dtype == torch.float32 for n in ns]
float32_runs = pytest.mark.parametrize(("kind", "number"), FLOAT32)


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_checkpoint(None, "auto"))


@functools.cache
def demo(dtype: torch.dtype) -> LlamaModel:
    checkpoint = open_checkpoint(None, "auto")
    return build_model(checkpoint.config, load_weights(checkpoint, dtype=dtype, device=CPU))


def view_of(lengths: list[int]) -> tuple[AttentionView, int]:
    """Whole texts side by side, a tile each, and the pages that they take."""
    bounds = tuple(accumulate(lengths, initial=0))
    width = -(-max(lengths) // PAGE)
    pages = torch.arange(width * len(lengths), dtype=torch.int32).view(len(lengths), width)
    masks = [mask for n in lengths for mask in (CHAIN[:n] if n <= TREE_WIDTH else [0] * n)]
    positions = [torch.arange(n) for n in lengths]
    view = AttentionView(
        positions=torch.cat(positions),
        cache_index=torch.cat([p + i * width * PAGE for i, p in enumerate(positions)]),
        ancestors=torch.tensor(masks),
        tile_starts=torch.tensor(bounds, dtype=torch.int32),
        contexts=torch.zeros(len(lengths), dtype=torch.int32),
        pages=pages,
        bounds=bounds,
        tails=torch.tensor(lengths, dtype=torch.int32),
    )
    return view, pages.numel()


def kernels_of(kind: str, dtype: torch.dtype) -> Kernels:
    config = demo(dtype).config
    if kind == "compiled":
        return compiled_kernels(config, dtype)
    return ReferenceKernels(config, LENGTH, CPU)


@functools.cache
@torch.inference_mode()
def all_logits(kind: str, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """By number of the case, (len(greedy), vocab): logits at the prompt's end and what follows."""
    model, kernels, numbers = demo(dtype), kernels_of(kind, dtype), RUNS[kind, dtype]
    texts = [CASES[n]["ids"] + CASES[n]["greedy"][:-1] for n in numbers]
    view, pages = view_of([len(text) for text in texts])
    c = model.config
    layout = KVLayout(
        pages=pages, page_size=PAGE, kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=dtype
    )
    step = kernels.begin(view)
    tokens = torch.tensor([token for text in texts for token in text])
    hidden, _ = model.forward(tokens, step, [layout.allocate(CPU) for _ in model.layers])
    return {
        n: model.logits(hidden[end - len(CASES[n]["greedy"]) : end], step)
        for end, n in zip(view.bounds[1:], numbers, strict=True)
    }


@pytest.mark.parametrize("number", range(len(CASES)))
def test_ids_equal_the_reference(number: int) -> None:
    case = CASES[number]
    assert tokenizer().encode(case["text"], add_special_tokens=True) == case["ids"]


@float32_runs
def test_log_probabilities_equal_the_reference(kind: str, number: int) -> None:
    log_probs = all_logits(kind, torch.float32)[number][0].log_softmax(-1)
    ids, values = zip(*CASES[number]["top10"], strict=True)
    torch.testing.assert_close(log_probs[list(ids)], torch.tensor(values), atol=1e-3, rtol=0)
    assert log_probs.topk(10).indices.sort().values.tolist() == sorted(ids)


@float32_runs
def test_the_greedy_continuation_equals_the_reference(kind: str, number: int) -> None:
    case, logits = CASES[number], all_logits(kind, torch.float32)[number]
    best = logits.topk(2)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    choices = zip(
        best.indices[:, 0].tolist(), case["greedy"], margins, case["margins"], strict=True
    )
    for chosen, wanted, margin, reference in choices:
        if reference > 1e-3:
            assert chosen == wanted
        assert margin == pytest.approx(reference, abs=2e-3)


@pytest.mark.parametrize("number", RUNS["compiled", torch.bfloat16])
def test_bfloat16_agrees_where_the_reference_is_sure(number: int) -> None:
    case = CASES[number]
    chosen = all_logits("compiled", torch.bfloat16)[number].argmax(-1).tolist()
    sure = [i for i, margin in enumerate(case["margins"]) if margin > 0.5]
    assert sure
    assert [chosen[i] for i in sure] == [case["greedy"][i] for i in sure]
